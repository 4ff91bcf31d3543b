"""``learner.epochs_per_batch``: passes over one batch, their ages under the bound, and what counts once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.step_result import StepResult, step_result, trained_metrics
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Lease, Prompt
from tests.examples import examples
from tests.learner.loop.scripted_run import PLAIN_STATS, answered, make_run
from tests.learner.losses.test_advantages import prepare, rollout


def test_every_epoch_repeats_the_same_updates_in_the_same_order_as_new_versions(tmp_path: Path):
    run = make_run(
        tmp_path, learner={"steps": 2, "updates_per_batch": 2, "epochs_per_batch": 3}, queue={"max_staleness": 5},
        loss={"preset": "decoupled_ppo"},
    )  # fmt: skip
    state = run.start()
    assert (state.step, state.version, run.engine.versions) == (2, 12, list(range(12)))
    assert [[s.sequence_id for s in sequences] for _, sequences in run.engine.calls] == [[0, 1], [2, 3]] * 6
    assert run.weights.published == [0, 6, 12]
    # The proximal policy is that before the first epoch.
    assert run.engine.scored == [("policy", 0), ("policy", 6)]
    assert all(len(s.proximal_logprobs) for s in run.engine.trained_on)
    # Two groups of two rollouts a step, three tokens each: counted once.
    assert [run.ledger[what]["trained"] for what in ("groups", "rollouts", "tokens")] == [4, 8, 24]
    assert [(row["tokens/trained"], row["skip/steps"]) for row in run.rows] == [(12, 0)] * 2
    # The first batch is sampled at 0 and trained at 0, 1, ..., 5: mean 2.5.
    assert (run.rows[0]["staleness/mean"], run.rows[0]["staleness/max"]) == (2.5, 5)


def result_of(prepared: PreparedBatch, *updates: UpdateStats) -> StepResult:
    group = Group("lease", "train", 0, "g", "l", 1.0, (rollout(1, 3), rollout(0, 2)))
    return step_result((TakenGroup(group, Prompt(0, 0, 0, (), {}), 0.0, 5),), prepared, updates, version=5)


def test_sequences_and_tokens_that_some_epochs_leave_out_are_counted_once():
    # Rollouts of 3 and 2 tokens. Epoch 0 skips sequence 1 and one token of sequence 0; epoch 1 only two tokens.
    prepared = prepare([rollout(1, 3), rollout(0, 2)])
    first = replace(
        PLAIN_STATS, skipped_sequence_ids=(1,), skipped_tokens=2, out_of_range_tokens=1, rule_tokens={"far": 1}
    )
    second = replace(PLAIN_STATS, out_of_range_tokens=2, rule_tokens={"far": 2})
    result = result_of(prepared, first, second)
    assert (result.facts.rollouts_trained, result.facts.tokens_trained) == (2, 4)
    assert result.facts.tokens_masked == {"token_range": 1}
    # Two tokens of two are left out of both epochs.
    both = result_of(prepared, first, first)
    assert both.facts.rollouts_masked == {"skip_threshold": 1}
    assert both.facts.tokens_masked == {"skip_threshold": 2, "token_range": 1}
    # A skipped epoch decides nothing.
    assert result_of(prepared, replace(first, stepped=False), second).facts.tokens_masked == {"token_range": 2}
    # Ages 0 and 1 of all five tokens. The rule met 3 of 10.
    assert (result.staleness.mean, result.staleness.max) == (0.5, 1)
    metrics = trained_metrics(result)
    assert (metrics["rule/far"], metrics["skip/sequences"], metrics["skip/steps"]) == (0.3, 1, 0)


@given(data=st.data())
@examples(25)
def test_no_epoch_ever_trains_a_token_above_the_bound(data: st.DataObject):
    updates, epochs, sync_every = (data.draw(st.integers(1, 3), label=name) for name in ("updates", "epochs", "sync"))
    bound = sync_every + updates * epochs - 2 + data.draw(st.integers(0, 3), label="room")
    on_stale = data.draw(st.sampled_from(["drop", "mask", "wait"]), label="on_stale")
    skips = data.draw(st.lists(st.booleans(), max_size=12), label="steps")

    def late(lease: Lease, version: int) -> Group:
        # Only versions that were sent can sample: the learner knows no others.
        sent = [sent for sent in run.weights.published if lease.min_version <= sent <= version]
        return answered(lease, data.draw(st.sampled_from(sent or [version]), label="sampled at"))

    with TemporaryDirectory() as directory:
        run = make_run(
            Path(directory),
            num_rows=400,
            learner={
                "steps": 5, "groups_per_step": updates, "updates_per_batch": updates, "epochs_per_batch": epochs,
            },
            queue={"max_staleness": bound, "on_stale": on_stale},
            weights={"sync_every": sync_every},
        )  # fmt: skip
        run.engine.stepped = skips
        run.start(answer=late)
        assert len(run.rows) == 5
        assert len(run.engine.calls) <= 5 * updates * epochs
        for version, sequences in run.engine.calls:
            ages = np.concatenate([version - s.versions[s.loss_mask] for s in sequences])
            assert 0 <= ages.min() <= ages.max() <= bound
        assert run.ledger["groups"]["trained"] <= 5 * updates
