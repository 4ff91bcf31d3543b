"""From a prepared step to the advantages of its tokens: what enters the baselines, in which order, and what leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.judge import JudgeConfig
from async_rl.config.loss import LossConfig
from async_rl.config.reward import RewardConfig
from async_rl.errors import TrainingError
from async_rl.learner.data.batch import PreparedBatch, along_tokens
from async_rl.learner.interface import PolicyScores
from async_rl.learner.loop.step_result import trained_counts
from async_rl.learner.losses.advantages import (
    agreement,
    best,
    group_centred,
    group_normalised,
    leave_one_out,
    length_bonuses,
    whitened,
    with_advantages,
    zero_groups,
)
from async_rl.records import FinishReason, Rollout, TokenSequence
from tests.learner.data import test_batch as batch

JUDGE = JudgeConfig(endpoint="http://127.0.0.1:1", model="m")
ESTIMATORS = ("group_norm", "group_mean", "leave_one_out", "global_norm", "reinforce_pp")


def rollout(
    reward: float, num_tokens: int | Sequence[int] = 1, finish: FinishReason = "stop", *, logprob: float = -1.0
) -> Rollout:
    """Two prompt tokens, then the sampled ones, by version 5; several sequences for several numbers."""
    counts = [num_tokens] if isinstance(num_tokens, int) else num_tokens
    made = [batch.rollout(reward, [5] * num, finish, logprob=logprob) for num in counts]
    sequences = tuple(sequence for one in made for sequence in one.sequences)
    return Rollout(sequences, {"correct": reward}, float(reward > 0), finish)


def prepare(*groups: Sequence[Rollout], unknown: Sequence[int] = (), **settings: Any) -> PreparedBatch:
    """``unknown`` are the groups of unknown weights."""
    taken = [
        batch.taken(*rollouts, arrival=5, position=index, digest="bad" if index in unknown else "good")
        for index, rollouts in enumerate(groups)
    ]
    return batch.prepare(*taken, **settings)


def loss(**keys: Any) -> LossConfig:
    return LossConfig.model_validate(keys)


def advantages(prepared: PreparedBatch) -> dict[int, float]:
    """By rollout; each must have one advantage for all of its trained tokens."""
    found: dict[int, float] = {}
    for sequence in prepared.sequences:
        values = set(sequence.advantages[sequence.loss_mask].tolist())
        index = prepared.rollout_of[sequence.sequence_id]
        assert len(values) == 1
        assert found.setdefault(index, min(values)) == min(values)
    return found


def token_advantages(prepared: PreparedBatch) -> list[list[float]]:
    return [s.advantages[s.loss_mask].tolist() for s in prepared.sequences]


def test_truncated_and_failed_rollouts_do_not_count_in_the_baseline():
    # The mean of 1 and 0.5 is 0.75; with the others' -1 and 0 it would be 0.125.
    step = prepare([rollout(1), rollout(-1, 1, "length"), rollout(0.5), rollout(0, 1, "error")])
    got = advantages(with_advantages(step, loss(advantage="group_mean")))
    assert got == {0: 0.25, 2: -0.25}


def test_a_baseline_of_the_step_is_over_all_groups_but_those_of_unknown_weights():
    # 1, 0, 1 and 1 have the mean 0.75 and the unbiased std 0.5.
    step = prepare([rollout(1), rollout(0)], [rollout(1), rollout(1)], [rollout(9), rollout(9)], unknown=[2])
    got = advantages(with_advantages(step, loss(advantage="global_norm")))
    assert got == {i: pytest.approx(centred / 0.5001) for i, centred in enumerate([0.25, -0.75, 0.25, 0.25])}


def test_reinforce_pp_whitens_over_the_tokens_of_the_step():
    # Tokens 0.5, 0.5, 0.5 and -0.5: mean 0.25, std 0.4330127.
    got = advantages(with_advantages(prepare([rollout(1, 3), rollout(0)]), loss(advantage="reinforce_pp")))
    assert got == {0: pytest.approx(0.25 / 0.4331127), 1: pytest.approx(-0.75 / 0.4331127)}


def test_reward_parts_are_normalised_apart_then_summed_as_in_trl_and_verl():
    # The code of TRL 1.16.0 (GRPOTrainer, normalize_then_sum) in float64, with weights 2, 0.5 and -0.1, and None of the
    # third function for the first two answers.
    first = [(1.0, 0.3, None), (0.0, 0.5, None), (1.0, 0.5, 2.0)], [(0.0, 0.25, -1.0), (0.0, 0.75, 4.0), (0.0, 0.25, 1)]
    trl = [0.4940318905, -1.7280863890, 1.2340544984, -0.1675095513, 0.4029843449, -0.2354747936]
    # That of verl 0.9.1 (compute_gdpo_outcome_advantage), one token an answer, with 0.5 for None, in float64. It adds
    # 1e-6 to deviations where TRL and this add 1e-4.
    second = [(1.0, 0.3, 0.5), (0.0, 0.5, 0.5), (1.0, 0.5, 2.0)], first[1]
    verl = [0.5632636539, -1.7409873429, 1.1777237365, -0.1737953889, 0.4180748514, -0.2442795100]
    reward = RewardConfig(scale=2.0, extra={"mine.py:short": 0.5, "judge": -0.1}, judge=JUDGE)
    for groups, expected, tolerance in ((first, trl, 1e-6), (second, verl, 1e-3)):
        step = prepare(*([in_parts(values, (2.0, 0.5, -0.1)) for values in group] for group in groups))
        got = advantages(with_advantages(step, loss(advantage="per_part_norm"), reward=reward))
        np.testing.assert_allclose([got[i] for i in range(6)], expected, rtol=tolerance)
    # The weights of parts count after their deviations have been divided out.
    even = advantages(with_advantages(step, loss(advantage="per_part_norm")))
    assert abs(even[2] - got[2]) > 0.1
    alike = prepare([in_parts((0.1, 0.3, 0.7), (1, 1, 1))] * 3, [in_parts((1, None, 0.5), (1, 1, 1))])
    assert set(advantages(with_advantages(alike, loss(advantage="per_part_norm"))).values()) == {0.0}


def in_parts(values: Sequence[float | None], weights: Sequence[float]) -> Rollout:
    """A rollout with weight times value in each part."""
    named = zip(("correct", "short", "judge"), values, weights, strict=True)
    parts = {name: weight * value for name, value, weight in named if value is not None}
    return Rollout(rollout(0).sequences, parts, 0.0, "stop")


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_a_step_without_a_signal_has_zeros_and_an_empty_one_has_nothing(advantage: str):
    for group in ([rollout(0.1)], [rollout(0.1), rollout(0.1), rollout(0.1)]):
        assert set(advantages(with_advantages(prepare(group), loss(advantage=advantage))).values()) == {0.0}
    # With nothing to train on, the reference was not asked.
    cut = prepare([rollout(1, 1, "length"), rollout(0, 1, "length")])
    settings = loss(advantage=advantage, kl_coef=0.1, kl_placement="reward")
    assert with_advantages(cut, settings).mini_batches == ((),)


def test_the_length_bonus_changes_the_reward_before_the_baseline():
    # Rewards 1 + 0.1, 1 + 0 and 0: mean 0.7.
    step = prepare([rollout(1, 10), rollout(1, 20), rollout(0, 5)])
    got = advantages(with_advantages(step, loss(advantage="group_mean", length_bonus=0.1)))
    np.testing.assert_allclose([got[0], got[1], got[2]], [0.4, 0.3, -0.7], rtol=1e-6)


def test_best_k_keeps_the_best_after_the_baseline_of_all():
    # The baseline 0.5 is of four. Of the two best, the first 0 precedes the second.
    groups = [rollout(0), rollout(1), rollout(0), rollout(1)], [rollout(0), rollout(0)]
    step = with_advantages(prepare(*groups), loss(advantage="group_mean", best_k=1))
    assert advantages(step) == {1: 0.5, 4: 0.0}
    assert step.masked == {0: "best_k", 2: "best_k", 3: "best_k", 5: "best_k"}
    masked = prepare([rollout(2, 1, "length"), rollout(1), rollout(0), rollout(0, 1, "error")])
    assert advantages(with_advantages(masked, loss(advantage="group_mean", best_k=2))) == {1: 0.5, 2: -0.5}


def test_what_best_k_leaves_out_is_accounted_for_once_with_its_stale_tokens():
    mask = np.array([False, True, True])
    sequence = TokenSequence(
        np.arange(3, dtype=np.int32), mask, np.zeros(3, np.float32), np.array([-1, 1, 5], np.int32)
    )
    half_stale = Rollout((sequence,), {"correct": 0.0}, 0.0, "stop")
    step = prepare([half_stale, rollout(1, 3)], oldest_version=4)
    facts = trained_counts(with_advantages(step, loss(best_k=1)), [], stepped=[True])
    assert (facts.rollouts_trained, dict(facts.rollouts_masked)) == (1, {"best_k": 1})
    assert (facts.tokens_trained, dict(facts.tokens_masked)) == (3, {"best_k": 2})


def scored(step: PreparedBatch, scores: Mapping[int, np.ndarray]) -> PreparedBatch:
    """``step`` with the reference's logprobs, by sequence id."""
    return step.with_sequences(
        replace(s, reference_logprobs=along_tokens(s, scores[s.sequence_id])) for s in step.sequences
    )


def evenly_scored(step: PreparedBatch, *values: float) -> PreparedBatch:
    """``step`` with the reference's logprobs: one value for all tokens of each sequence."""
    return scored(step, {i: np.full(step.sequence_tokens[i], value) for i, value in enumerate(values)})


def policy_scored(step: PreparedBatch, *logprobs: list[float]) -> PreparedBatch:
    """``step`` with the policy's logprobs before the first update, by sequence id."""
    scores = {
        i: PolicyScores(np.array(values, np.float32), np.zeros(len(values), np.float32))
        for i, values in enumerate(logprobs)
    }
    return replace(step, policy_scores=scores)


def test_the_off_policy_baseline_weighs_answers_by_length_and_squared_ratio():
    # arXiv:2602.17616 with n = length: w = 1/2, 1, 2, 10 of 8, 2, 4 and 1 tokens: w^2 n = 2, 2, 16 and 100,
    # b = (2 + 16) / 120 = 0.15. The second answer has two sequences.
    step = prepare([rollout(1, 8), rollout(0, [1, 1]), rollout(1, 4), rollout(0, 1)])
    logprobs = [[-1 + math.log(w) / n] * n for w, n in ((0.5, 8), (1.0, 1), (1.0, 1), (2.0, 4), (10.0, 1))]
    got = advantages(with_advantages(policy_scored(step, *logprobs), loss(advantage="off_policy_optimal")))
    np.testing.assert_allclose([got[i] for i in range(4)], [0.85, -0.15, 0.85, -0.15], rtol=1e-5)


def test_ratios_of_whole_answers_that_no_float_holds_do_not_spoil_the_baseline():
    # log w = 900 and -900, whose squares are no floats: the first answer is the baseline.
    step = policy_scored(prepare([rollout(1), rollout(0)]), [899.0], [-901.0])
    got = advantages(with_advantages(step, loss(advantage="off_policy_optimal")))
    assert (got[0], got[1]) == (0.0, -1.0)


def test_answers_that_are_not_trained_have_no_weight_in_the_off_policy_baseline():
    # A NaN of mu, which the loss leaves out, and an answer without a token: b = (1 + 0) / 2.
    step = prepare([rollout(1), rollout(0), rollout(3, logprob=math.nan), rollout(2, 0)])
    scored_step = policy_scored(step, [-1.0], [-1.0], [-1.0], [])
    got = token_advantages(with_advantages(scored_step, loss(advantage="off_policy_optimal")))
    assert got == [[0.5], [-0.5], [2.5], []]


def test_the_kl_may_be_that_of_the_trained_policy_in_the_reward_and_in_the_advantage():
    # log pi = -0.5, -0.75 and -1; ref -1.5, -0.75: d = 1, 0.75 and -0.25, whatever mu is. Sums 1.75 and -0.25, times
    # 0.1: rewards 0.825 and 0.025, mean 0.425. The first rollout has two sequences.
    step = policy_scored(prepare([rollout(1, [1, 1]), rollout(0, 1)]), [-0.5], [-0.75], [-1.0])
    keys = {"advantage": "group_mean", "kl_coef": 0.1, "kl_policy": "trained"}
    penalised = with_advantages(evenly_scored(step, -1.5, -1.5, -0.75), loss(kl_placement="reward", **keys))
    got = advantages(penalised)
    np.testing.assert_allclose([got[0], got[1]], [0.4, -0.4], rtol=1e-6)
    assert penalised.reference_kl == pytest.approx(0.5)
    # In the advantages: 0.5 and -0.5, less 0.1 d of each token.
    penalised = with_advantages(evenly_scored(step, -1.5, -1.5, -0.75), loss(kl_placement="advantage", **keys))
    np.testing.assert_allclose(token_advantages(penalised), [[0.4], [0.425], [-0.475]], rtol=1e-6)
    half_square = loss(kl_placement="advantage", kl_estimator="k2", **keys)
    squared = with_advantages(evenly_scored(step, -1.5, -1.5, -0.75), half_square)
    assert squared.reference_kl == pytest.approx((1 + 0.75**2 + 0.25**2) / 6)


def test_a_rollout_that_was_not_scored_counts_with_its_group_s_mean_kl():
    # KL sums 1 and 3; the one without logprobs and the one that is too long get 2. Rewards 0.9, -0.3, -0.2 and -0.2:
    # mean 0.05.
    step = prepare([rollout(1), rollout(0), rollout(0, logprob=math.nan), rollout(0, 9)], max_tokens=8)
    settings = loss(advantage="group_mean", kl_coef=0.1, kl_placement="reward")
    got = advantages(with_advantages(evenly_scored(step, -2.0, -4.0, -3.0), settings))
    np.testing.assert_allclose([got[0], got[1]], [0.85, -0.35], rtol=1e-5)


def test_a_nan_among_behavior_logprobs_reaches_no_other_rollout():
    step = evenly_scored(prepare([rollout(1), rollout(0), rollout(0, 1, logprob=math.nan)]), -2.0, -4.0, -1.0)
    for advantage, placement in (("group_mean", "reward"), ("reinforce_pp", "advantage")):
        settings = loss(advantage=advantage, kl_coef=0.1, kl_placement=placement)
        assert np.isfinite(list(advantages(with_advantages(step, settings)).values())).all()


def test_a_reference_logprob_that_is_not_finite_is_refused_by_name():
    settings = loss(kl_coef=0.1, kl_placement="reward")
    with pytest.raises(TrainingError, match=r"loss\.kl_reference"):
        with_advantages(evenly_scored(prepare([rollout(1), rollout(0)]), math.nan, 0.0), settings)


def with_values(prepared: PreparedBatch, values: Sequence[float]) -> PreparedBatch:
    """Give the tokens of each rollout its value as their advantage."""
    return prepared.with_sequences(
        replace(
            s, advantages=along_tokens(s, np.full(int(s.loss_mask.sum()), values[prepared.rollout_of[s.sequence_id]]))
        )
        for s in prepared.sequences
    )


def test_agreement_counts_the_pairs_of_a_group_that_differ_in_accuracy_and_advantage():
    # Accuracies [1, 0, 0 | 1, 0]. The pairs: 3 > 1 and 3 < 4 | 2 = 2, which does not count. In the last row two pairs
    # agree and one does not: (2 - 1) / 3.
    prepared = prepare([rollout(1.0), rollout(0.0), rollout(0.0)], [rollout(1.0), rollout(0.0)])
    for values, expected in (
        ([3.0, 1.0, 4.0, 2.0, 2.0], 0.0), ([5.0, 1.0, 4.0, 2.0, 2.0], 1.0), ([0.0, 1.0, 4.0, 2.0, 3.0], -1.0),
        ([5.0, 1.0, 4.0, 2.0, 3.0], pytest.approx(1 / 3)),
    ):  # fmt: skip
        assert agreement(with_values(prepared, values)) == expected
    assert agreement(prepare([rollout(1.0), rollout(1.0)], [rollout(0.0)])) is None
    masked = prepare([rollout(1.0), rollout(0.0, finish="length")])
    assert agreement(with_values(masked, [1.0, 2.0])) is None, "the wrong one is masked"


def test_zero_groups_are_those_of_equal_rewards_that_have_something_to_train():
    # 0.1 three times has a mean that is not 0.1. The last group is masked, and so are answers that were cut.
    equal, differing = [rollout(0.1)] * 3, [rollout(0.5), rollout(1.0)]
    cut = [rollout(1.0), rollout(1.0), rollout(0.0, finish="length")]
    step = prepare(equal, differing, cut, differing, [rollout(1.0, finish="length")])
    assert zero_groups(with_advantages(step, loss())) == 0.5
    assert zero_groups(prepare([rollout(1.0, finish="length")])) is None


Estimator = Callable[[np.ndarray], np.ndarray]
GROUP_ESTIMATORS = pytest.mark.parametrize("estimator", [group_normalised, group_centred, leave_one_out])


@GROUP_ESTIMATORS
def test_groups_without_a_signal_have_exactly_no_advantage(estimator: Estimator):
    # The float mean of three times 0.1 is not 0.1.
    for rewards in ([], [3.0], [0.1, 0.1, 0.1]):
        assert estimator(np.array(rewards)).tolist() == [0.0] * len(rewards)
    assert whitened(np.full(3, 0.1)).tolist() == [0.0, 0.0, 0.0]


@GROUP_ESTIMATORS
@given(st.lists(st.floats(-1e6, 1e6), max_size=20), st.randoms(use_true_random=False))
def test_advantages_are_finite_sum_to_zero_and_do_not_depend_on_the_order(
    estimator: Estimator, rewards: list[float], random
):
    values = np.array(rewards, dtype=np.float64)
    advantages = estimator(values)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) <= 1e-9 * max(1.0, np.abs(values).sum() / 1e-4)
    order = list(range(len(rewards)))
    random.shuffle(order)
    np.testing.assert_allclose(estimator(values[order]), advantages[order], rtol=1e-6, atol=1e-6)


@GROUP_ESTIMATORS
def test_rewards_that_are_not_finite_are_refused(estimator: Estimator):
    with pytest.raises(ValueError, match="finite rewards"):
        estimator(np.array([1.0, np.nan]))


@pytest.mark.parametrize(
    ("accuracies", "num_tokens", "bonuses"),
    [
        # Right answers of 10, 20 and 40 tokens: 0.1 * (1 - [0, 10, 30] / 30). The wrong one is shorter, and out of it.
        ([1.0, 1.0, 0.0, 1.0], [10, 20, 5, 40], [0.1, 0.1 * 2 / 3, 0.0, 0.0]),
        ([1.0, 1.0], [10, 20], [0.0, 0.0]),  # all right: length alone would be rewarded
        ([0.0, 0.0], [10, 20], [0.0, 0.0]),
        ([1.0, 1.0, 0.0], [10, 10, 20], [0.0, 0.0, 0.0]),  # right answers of one length: 0 / 0
        ([1.0, 0.0], [10, 20], [0.0, 0.0]),
        ([0.5, 0.0], [10, 20], [0.0, 0.0]),  # partly right is not right
        ([], [], []),
    ],
)
def test_the_bonus_falls_from_the_shortest_right_answer_to_the_longest_beside_a_wrong_one(
    accuracies: list[float], num_tokens: list[int], bonuses: list[float]
):
    np.testing.assert_allclose(length_bonuses(np.array(accuracies), np.array(num_tokens), 0.1), bonuses)


def test_the_best_k_are_the_highest_and_the_earlier_of_equal_ones():
    values = np.array([0.0, 2.0, 1.0, 2.0, 1.0])
    assert best(values, 1).tolist() == [False, True, False, False, False]
    assert best(values, 3).tolist() == [False, True, True, True, False]
    assert best(values, 9).all()
