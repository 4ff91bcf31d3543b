"""Group-normalised advantages, by hand and at their edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.advantages import group_normalised


def test_advantage_is_distance_from_mean_over_unbiased_std():
    # Mean 0.25; unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25, std 0.5.
    advantages = group_normalised(np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(advantages, np.array([0.75, -0.25, -0.25, -0.25]) / 0.5001, rtol=1e-12)
    assert advantages.dtype == np.float64


def test_group_of_one_has_no_advantage():
    assert group_normalised(np.array([3.0])).tolist() == [0.0]


def test_empty_group_has_no_advantages():
    assert group_normalised(np.array([])).tolist() == []


def test_equal_rewards_have_exactly_no_advantage():
    # The float mean of three times 0.1 is not 0.1.
    assert group_normalised(np.full(3, 0.1)).tolist() == [0.0, 0.0, 0.0]


def test_float32_rewards_are_normalised_in_float64():
    assert group_normalised(np.array([0, 1], dtype=np.float32)).dtype == np.float64


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_advantages_are_finite_and_sum_to_zero(rewards: list[float]):
    advantages = group_normalised(np.array(rewards))
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) < 1e-4


def test_nan_reward_is_refused():
    with pytest.raises(ValueError, match="finite rewards"):
        group_normalised(np.array([1.0, np.nan]))


def test_two_dimensional_rewards_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 2\]"):
        group_normalised(np.zeros((2, 2)))
