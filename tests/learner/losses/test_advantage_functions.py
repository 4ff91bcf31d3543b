"""Every estimator by hand, at its edges, and against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.losses.advantages import (
    best,
    group_centred,
    group_normalised,
    leave_one_out,
    length_bonuses,
    whitened,
)

Estimator = Callable[[np.ndarray], np.ndarray]
ESTIMATORS = pytest.mark.parametrize("estimator", [group_normalised, group_centred, leave_one_out])
REWARDS = st.lists(st.floats(-1e6, 1e6), max_size=20)


def test_grpo_is_distance_from_mean_over_unbiased_std():
    # Mean 0.25; unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25, std 0.5.
    advantages = group_normalised(np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(advantages, np.array([0.75, -0.25, -0.25, -0.25]) / 0.5001, rtol=1e-12)


def test_dr_grpo_is_distance_from_mean():
    np.testing.assert_allclose(group_centred(np.array([1.0, 0.0, 0.0, 0.0])), [0.75, -0.25, -0.25, -0.25])


def test_rloo_is_distance_from_the_mean_of_the_others():
    # 1 - (0 + 0 + 0) / 3 = 1; 0 - (1 + 0 + 0) / 3 = -1/3.
    np.testing.assert_allclose(leave_one_out(np.array([1.0, 0.0, 0.0, 0.0])), [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_whitening_uses_the_std_of_the_values_themselves():
    # Mean 1; variance (1 + 1 + 0 + 0) / 4 = 0.5.
    std = math.sqrt(0.5)
    np.testing.assert_allclose(whitened(np.array([0.0, 2.0, 1.0, 1.0])), np.array([-1, 1, 0, 0]) / (std + 1e-4))


@ESTIMATORS
def test_estimators_match_plain_loops(estimator: Estimator):
    generator = np.random.default_rng(0)
    for _ in range(50):
        rewards = generator.normal(size=generator.integers(2, 12))
        expected = [plain_advantage(estimator, rewards.tolist(), i) for i in range(len(rewards))]
        np.testing.assert_allclose(estimator(rewards), expected, atol=1e-6)


def plain_advantage(estimator: Estimator, rewards: list[float], index: int) -> float:
    num = len(rewards)
    if estimator is leave_one_out:
        others = [reward for j, reward in enumerate(rewards) if j != index]
        return rewards[index] - sum(others) / len(others)
    mean = sum(rewards) / num
    if estimator is group_centred:
        return rewards[index] - mean
    variance = sum((reward - mean) ** 2 for reward in rewards) / (num - 1)
    return (rewards[index] - mean) / (math.sqrt(variance) + 1e-4)


@ESTIMATORS
def test_groups_without_a_signal_have_exactly_no_advantage(estimator: Estimator):
    # The float mean of three times 0.1 is not 0.1.
    for rewards in ([], [3.0], [0.1, 0.1, 0.1]):
        assert estimator(np.array(rewards)).tolist() == [0.0] * len(rewards)
    assert whitened(np.full(3, 0.1)).tolist() == [0.0, 0.0, 0.0]


@ESTIMATORS
def test_float32_rewards_become_float64_advantages(estimator: Estimator):
    assert estimator(np.array([0, 1], dtype=np.float32)).dtype == np.float64


@ESTIMATORS
@given(REWARDS)
def test_advantages_are_finite_and_sum_to_zero(estimator: Estimator, rewards: list[float]):
    advantages = estimator(np.array(rewards))
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) <= 1e-9 * max(1.0, np.abs(rewards).sum() / 1e-4 if rewards else 1.0)


@ESTIMATORS
@given(REWARDS, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_a_group(estimator: Estimator, rewards: list[float], random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    values = np.array(rewards, dtype=np.float64)
    np.testing.assert_allclose(estimator(values[order]), estimator(values)[order], rtol=1e-6, atol=1e-6)


@ESTIMATORS
def test_rewards_that_are_not_finite_or_not_of_one_group_are_refused(estimator: Estimator):
    with pytest.raises(ValueError, match="finite rewards"):
        estimator(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match=r"\[2, 2\]"):
        estimator(np.zeros((2, 2)))


def test_the_length_bonus_falls_from_the_shortest_right_answer_to_the_longest():
    # Right answers of 10, 20 and 40 tokens: 0.1 * (1 - [0, 10, 30] / 30). The wrong one is shorter, and out of it.
    bonuses = length_bonuses(np.array([1.0, 1.0, 0.0, 1.0]), np.array([10, 20, 5, 40]), 0.1)
    np.testing.assert_allclose(bonuses, [0.1, 0.1 * 2 / 3, 0.0, 0.0])


@pytest.mark.parametrize(
    ("accuracies", "num_tokens"),
    [
        ([1.0, 1.0], [10, 20]),  # all right: length alone would be rewarded
        ([0.0, 0.0], [10, 20]),
        ([1.0, 1.0, 0.0], [10, 10, 20]),  # right answers of one length: 0 / 0
        ([1.0, 0.0], [10, 20]),
        ([0.5, 0.0], [10, 20]),  # partly right is not right
        ([1.0], [10]),
        ([], []),
    ],
)
def test_there_is_no_length_bonus_without_right_answers_of_several_lengths_beside_a_wrong_one(
    accuracies: list[float], num_tokens: list[int]
):
    assert length_bonuses(np.array(accuracies), np.array(num_tokens), 0.1).tolist() == [0.0] * len(accuracies)


def test_the_best_k_are_the_highest_and_the_earlier_of_equal_ones():
    values = np.array([0.0, 2.0, 1.0, 2.0, 1.0])
    assert best(values, 1).tolist() == [False, True, False, False, False]
    assert best(values, 3).tolist() == [False, True, True, True, False]
    assert best(values, 9).all()
