"""The simulation of a run against arithmetic: constant lengths, so that the steady state is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.extensions.insight.plan.lengths import Lengths
from async_rl.extensions.insight.plan.rates import Rates
from async_rl.extensions.insight.plan.simulation import Prediction, Setting, simulate

TEN = Lengths(10)


def make_config(**sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "run": {"dir": "none"}, "model": {"path": "none"}, "data": {"train": "none.jsonl"},
        "learner": {"groups_per_step": 4}, "sampling": {"group_size": 2}, "generator": {"batch_size": 8},
    }  # fmt: skip
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return parse_config(raw, "the test's config")


def predict(bound: int, *, generators: int = 1, ranks: int = 1, lengths: Lengths = TEN, **changes: Any) -> Prediction:
    """4 groups of 2 rollouts fill the 8 slots of a generator. Sampling them takes 10 s, training 6 s, the rest 1 s."""
    sections = {name: changes.pop(name) for name in ("queue", "weights", "learner") if name in changes}
    rates = Rates(**{"lengths": lengths, "decode_step_s": 1.0, "train_s": 6.0, "after_s": 1.0} | changes)
    return simulate(make_config(**sections), rates, Setting(bound, generators, ranks, lengths), num_steps=20)


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
def test_on_policy_each_side_waits_for_the_other(on_stale):
    # A step is 10 s of sampling, 6 s of training and 1 s until the next version: 17 s. The learner waits for 10 of
    # them, the generator for 7.
    found = predict(0, queue={"on_stale": on_stale})
    assert found.steps_per_s == pytest.approx(1 / 17)
    assert (found.idle_learner, found.idle_generators) == pytest.approx((10 / 17, 7 / 17))
    assert found.staleness == {0: 1.0}


def test_one_version_of_staleness_hides_the_training():
    # The generator never waits, so a step takes 10 s. Batch n + 1 is sampled from 10 s to 20 s, version n + 1 arrives
    # at 17 s: 7 of 10 tokens are one version old when they are trained at version n + 1.
    found = predict(1, version_bytes=100.0)
    assert found.steps_per_s == pytest.approx(1 / 10)
    assert (found.idle_learner, found.idle_generators) == pytest.approx((3 / 10, 0))
    assert found.staleness == pytest.approx({0: 0.3, 1: 0.7})
    assert found.weights_bytes_per_s == pytest.approx(100 / 10)  # one generator, a version every 10 s


def test_with_two_generators_the_learner_is_the_slower_side():
    # Sampling a batch takes 5 s then, training still 7 s with all that follows it.
    found = predict(4, generators=2, version_bytes=100.0)
    assert found.steps_per_s == pytest.approx(1 / 7)
    assert found.idle_learner == pytest.approx(0)
    assert found.weights_bytes_per_s == pytest.approx(2 * 100 / 7)
    # Ranks divide the part of a step that grows with its tokens: 80 at 0.1 s are 4 s with two, so 2 + 4 + 1 s.
    found = predict(4, generators=2, ranks=2, train_s=2.0, train_token_s=0.1)
    assert found.steps_per_s == pytest.approx(1 / 7)


def test_a_transfer_and_a_pause_lengthen_an_on_policy_step():
    assert predict(0, transfer_s=2.0, pause_s=1.0).steps_per_s == pytest.approx(1 / 20)
    # With a bound of 1 the pause of a version stops running sequences: 1 s in each step of 10 s of decoding.
    assert predict(1, pause_s=1.0).steps_per_s == pytest.approx(1 / 11)


def test_a_decode_step_takes_longer_the_more_sequences_run():
    # Each pair of lengths 1 and 3: with 2 s a step and 1 s a sequence, 8 sequences take 10 s for one token, then 4 of
    # them 6 s for each of two more.
    found = predict(0, lengths=Lengths.of_groups(((1, 3),)), decode_step_s=2.0, decode_sequence_s=1.0)
    assert found.steps_per_s == pytest.approx(1 / (10 + 2 * 6 + 6 + 1))
    assert found.idle_generators == pytest.approx(7 / 29)


def test_the_filter_costs_the_share_that_it_filters():
    # Half of the groups are filtered, so a batch takes about 20 s of sampling.
    found = predict(4, filtered=0.5)
    assert found.steps_per_s == pytest.approx(1 / 20, rel=0.15)


def test_mask_loses_the_old_tokens_of_long_answers_and_drop_their_groups():
    lengths = Lengths(10, 1.0)
    masked, dropped = (
        predict(1, lengths=lengths, train_s=0.0, after_s=0.5, queue={"on_stale": mode}, generators=2)
        for mode in ("mask", "drop")
    )
    assert (masked.masked > 0.02, masked.dropped) == (True, 0)
    assert (dropped.masked, dropped.dropped > 0.02) == (0, True)
    assert max(masked.staleness) == max(dropped.staleness) == 1


def test_the_shares_of_the_trained_tokens_add_up_to_one():
    # The learner takes its next batch at once, so one batch is taken, but not trained, at the end of what counts.
    found = predict(5, lengths=Lengths(20, 1.2), train_s=2.0, after_s=0.2, decode_step_s=0.1, generators=3)
    assert sum(found.staleness.values()) == pytest.approx(1)


def test_lengths_have_their_mean_and_limit_and_observed_groups_stay_whole():
    drawn = Lengths(100, 0.5).draw(4000, 8, seed=0)
    assert drawn.mean() == pytest.approx(100, rel=0.02)
    assert Lengths(100, 2.0, limit=150).draw(1000, 8, seed=0).max() == 150
    groups = Lengths(5, observed=((1, 9), (4, 6))).draw(50, 2, seed=0)
    assert {tuple(group) for group in groups.tolist()} == {(1, 9), (4, 6)}
    assert np.unique(Lengths(5, observed=((1, 9), (4, 6))).draw(50, 3, seed=0)).tolist() == [1, 4, 6, 9]
