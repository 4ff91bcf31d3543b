"""A step's diagnostics as metrics: overall and by lag, merged over its updates."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.errors import TrainingError
from async_rl.learner.interface import PaddedCost, UpdateCost, UpdateStats
from async_rl.learner.loop.step_result import (
    agent_metrics,
    check_skipped,
    count_skipped,
    cut_metrics,
    device_metrics,
    source_metrics,
    turn_metrics,
    update_metrics,
)
from async_rl.learner.losses.diagnostics import diagnostic_sums
from async_rl.learner.losses.policy import policy_loss
from async_rl.queue.messages import TakenGroup
from async_rl.records import AgentSession, Group, Prompt, Rollout, TokenSequence, Turn
from tests.learner.loop.scripted_run import PLAIN_STATS
from tests.learner.losses.cases import of_ratios


def an_update(ratios: list[float], lags: list[int], after_update: list[bool] | None = None) -> UpdateStats:
    inputs = of_ratios(ratios, [1.0] * len(ratios), lag=lags)
    out = policy_loss(inputs, LossConfig(), max_length=8)
    after = None if after_update is None else torch.tensor(after_update)
    skipped = torch.zeros(len(ratios), dtype=torch.bool)
    rows = diagnostic_sums(out, skipped, inputs.lag, 4, after_update_N=after).numpy()
    return replace(PLAIN_STATS, by_lag=rows)


def test_updates_of_a_step_are_merged_lag_by_lag():
    # Lag 1 has ratio 2 in one update and 1/2 in the other: k3 (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2, mean 1.25. Lag 3
    # has ratio 4, clipped. Over all three: k3 (1/2 + 3 - ln 4) / 3. Lags 0 and 2 did not occur.
    metrics = update_metrics([an_update([2.0, 4.0], [1, 3]), an_update([0.5], [1])])
    assert metrics["mismatch_kl/lag_1"] == pytest.approx(0.25)
    assert metrics["mismatch_kl/mean"] == pytest.approx((0.5 + 3 - math.log(4)) / 3)
    assert metrics["mismatch_kl/k1"] == pytest.approx(-math.log(4) / 3)
    assert (metrics["lag_1/ratio_mean"], metrics["lag_1/tokens"]) == (pytest.approx(1.25), 2)
    assert (metrics["lag_1/clip_high"], metrics["lag_3/clip_high"]) == (0.5, 1.0)
    assert not any("lag_0" in key or "lag_2" in key for key in metrics)
    assert "mismatch_kl/update_effect" not in metrics
    assert all(isinstance(value, float | int) and not isinstance(value, np.ndarray) for value in metrics.values())


def test_engines_without_diagnostics_costs_or_padding_report_none():
    metrics = update_metrics([PLAIN_STATS, PLAIN_STATS])
    assert (metrics["loss/policy"], metrics["entropy"]) == (0.5, 0.25)
    assert not any(key.startswith(("lag_", "mismatch_kl/", "kl/", "packing/", "routing/")) for key in metrics)
    assert update_metrics([]) == device_metrics([PLAIN_STATS], 2.0) == {}


def test_what_single_updates_report_is_merged_by_its_own_weight():
    # KL by trained tokens: (3 * 1 + 1 * 5) / 4. Padding: means. Routing: 1 of 10 and 5 of 30 tokens and layers.
    first = replace(PLAIN_STATS, reference_kl=1.0, tokens_trained=3, padded_cost=PaddedCost(0.25, 0.5), routing=(1, 10))
    second = replace(first, reference_kl=5.0, tokens_trained=1, padded_cost=PaddedCost(0.75, 0.0), routing=(5, 30))
    metrics = update_metrics([first, second])
    assert (metrics["kl/reference"], metrics["routing/different"]) == pytest.approx((2.0, 0.15))
    assert (metrics["packing/padding"], metrics["packing/repeated"]) == (0.5, 0.25)
    # Of experts in two layers: the busiest gets 6 of 8 tokens, thrice an even share; 3 of 8 get none.
    loads = [np.array([[6.0, 1, 0, 0], [1, 1, 0, 1]]), np.array([[0.0, 1, 0, 0], [1, 3, 0, 1]])]
    balanced = [replace(f, expert_load=load, balance_loss=b) for f, load, b in zip((first, second), loads, (2, 6))]
    found = update_metrics(balanced)
    assert (found["routing/busiest"], found["routing/unused"], found["routing/balance_loss"]) == (3.0, 3 / 8, 3.0)
    # At the first step the policy may be the reference model, to the bit.
    assert update_metrics([replace(PLAIN_STATS, reference_kl=0.0)])["kl/reference"] == 0.0


def test_phases_are_summed_over_the_updates_and_the_largest_peak_counts():
    costs = [
        UpdateCost({"forward": 1.0, "backward": 2.0}, flops=4e12, peak_flops_per_s=1e13, peak_memory_bytes=7),
        UpdateCost({"forward": 0.5, "backward": 1.5}, flops=2e12, peak_flops_per_s=1e13, peak_memory_bytes=9),
    ]
    updates = [replace(PLAIN_STATS, cost=cost) for cost in costs]
    metrics = update_metrics(updates)
    assert (metrics["time/forward_s"], metrics["time/backward_s"]) == (1.5, 3.5)
    # 6e12 operations in 2 s are 3e12 per second, and 0.3 of the peak. Of an unknown peak there is no share.
    expected = {"memory/peak_bytes": 9, "throughput/flops_per_s": 3e12, "throughput/mfu": pytest.approx(0.3)}
    assert device_metrics(updates, 2.0) == expected
    del expected["throughput/mfu"]
    unknown = [replace(PLAIN_STATS, cost=replace(cost, peak_flops_per_s=None)) for cost in costs]
    assert device_metrics(unknown, 2.0) == expected


def cut_rollout(*turn_tokens: int) -> Rollout:
    """A rollout that a limit cut, with so many tokens in each turn; with one number without an environment."""
    num_sampled = sum(turn_tokens)
    sequence = TokenSequence(
        np.arange(1 + num_sampled, dtype=np.int32), np.arange(1 + num_sampled) > 0,
        np.zeros(1 + num_sampled, np.float32), np.zeros(1 + num_sampled, np.int32),
    )  # fmt: skip
    turns = tuple(Turn(tokens, 0.0, 0.0) for tokens in turn_tokens) if len(turn_tokens) > 1 else ()
    return Rollout((sequence,), {}, 0.0, "length", turns=turns)


def test_cut_answers_are_counted_by_the_limit_that_cut_them():
    # Of four rollouts: one at 8 tokens in all, one at 3 in the last turn, one before either, and one not cut.
    whole = Rollout((), {}, 1.0, "stop", turns=(Turn(1, 1.0, 1.0),))
    rollouts = [cut_rollout(5, 3), cut_rollout(2, 3), cut_rollout(2, 2), whole]
    metrics = cut_metrics(rollouts, max_new_tokens=8, max_turn_tokens=3)
    assert metrics == {"length/cut_turn": 0.25, "length/cut_context": 0.25}
    assert cut_metrics([cut_rollout(8)], max_new_tokens=8, max_turn_tokens=None) == {}


def test_turns_scores_and_times_of_played_rollouts_are_reported():
    # Scores 1 + 0 and 0.5; the failed rollout was not played to its end and counts in neither.
    sessions = [AgentSession({"first": 1}, {"add": 2, "stop": 1}, 3.0, 1.0), AgentSession({"first": 1}, {}, 1.0, 0.5)]
    played = [
        Rollout((), {}, 1.0, "stop", turns=(Turn(1, 1.0, 1.0), Turn(2, 0.0, 0.0)), session=sessions[0]),
        Rollout((), {}, 0.5, "stop", turns=(Turn(1, 0.5, 0.5),), session=sessions[1]),
        Rollout((), {}, 0.0, "error"),
    ]
    metrics = turn_metrics(played)
    assert metrics == {
        "score/mean": 0.75, "turns/mean": 1.5, "turns/max": 2,
        "agent/tool_calls_mean": 1.5, "agent/sampling_s_mean": 2.0, "agent/own_s_mean": 0.75,
    }  # fmt: skip
    assert turn_metrics(played[2:]) == {}


def test_what_a_weight_update_does_is_told_from_staleness_by_comparing_tokens_of_one_lag():
    # Lag 1: ratio 2 after a weight update, k3 1 - ln 2; ratios 1 and 1 without, k3 0. Lag 2 has no token without an
    # update, lag 0 none with one. The effect is over the one token of lag 1.
    after_update = [True, False, False, True, False]
    metrics = update_metrics([an_update([2.0, 1.0, 1.0, 4.0, 3.0], [1, 1, 1, 2, 0], after_update)])
    assert metrics["mismatch_kl/update_effect"] == pytest.approx(1 - math.log(2))


def test_the_rollouts_of_each_named_source_have_figures_of_their_own():
    def taken(source: str, *scores: tuple[float, float]) -> TakenGroup:
        rollouts = tuple(Rollout((), {"correct": reward}, accuracy, "stop") for reward, accuracy in scores)
        return TakenGroup(Group("l", "train", 0, "g", "l", 1.0, rollouts), Prompt(0, 0, 0, (), {}, source), 0.0, 0)

    found = source_metrics(
        [taken("math", (2.0, 1.0), (0.0, 0.0)), taken("sums", (1.0, 1.0)), taken("math", (4.0, 1.0))]
    )
    # math: rewards 2, 0, 4 and accuracies 1, 0, 1 in two groups.
    assert found == {
        "source/math/groups": 2, "source/math/accuracy": pytest.approx(2 / 3), "source/math/reward": 2.0,
        "source/sums/groups": 1, "source/sums/accuracy": 1.0, "source/sums/reward": 1.0,
    }  # fmt: skip
    assert source_metrics([taken("", (1.0, 1.0))]) == {}


def test_a_metric_of_agents_is_the_mean_over_the_rollouts_that_have_it():
    numbers = [{"turns": 2.0}, {"turns": 4.0, "found": 1.0}, {}]
    found = agent_metrics([Rollout((), {}, 0.0, "stop", metrics=metrics) for metrics in numbers])
    assert found == {"agent/metric/turns": 3.0, "agent/metric/found": 1.0}


def skipped(reason: str) -> UpdateStats:
    return replace(
        an_update([1.0, 2.0, 0.5], [0, 2, 2]), stepped=False, reason=reason, grad_norm=0.25, ratio_mean=1.5,
        ratio_max=9.0, ess=0.125,
    )  # fmt: skip


def test_a_step_resets_the_count_of_skipped_ones_and_an_update_with_nothing_to_train_on_adds_to_it():
    assert count_skipped(2, [skipped("ess")]) == 3
    assert count_skipped(2, [None, skipped("ess")]) == 4
    assert count_skipped(2, [PLAIN_STATS, skipped("ess")]) == 1
    assert count_skipped(2, [skipped("ess"), PLAIN_STATS]) == 0


def test_the_run_stops_past_the_budget_with_what_was_measured_and_what_may_help():
    check_skipped(10, skipped("ess"), most=10)
    with pytest.raises(TrainingError) as stopped:
        check_skipped(11, skipped("the ESS is low"), most=10)
    # At lag 2: (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2; no token at lag 1.
    for part in (
        "the ESS is low", "ESS 0.125", "mean 1.5 and max 9", "gradient norm 0.25", "0 at lag 0, 0.25 at lag 2)",
        "queue.max_staleness", "optimizer.lr", "loss.min_ess",
    ):  # fmt: skip
        assert part in str(stopped.value)
