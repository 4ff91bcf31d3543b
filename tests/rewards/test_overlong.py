"""DAPO equation 13, and the variant that zeroes the reward, at and beside their boundaries."""

import pytest

from async_rl.rewards.registry import dapo_penalty, zero_at_limit_penalty


@pytest.mark.parametrize(
    ("num_tokens", "limit", "cache", "truncated", "expected"),
    [
        # L = 100, C = 20: free up to 80; then (80 - n) / 20; -1 from 100 on.
        (0, 100, 20, False, 0.0),
        (80, 100, 20, False, 0.0),
        (81, 100, 20, False, -0.05),
        (99, 100, 20, False, -0.95),
        (100, 100, 20, False, -1.0),
        (101, 100, 20, False, -1.0),
        (10, 100, 20, True, -1.0),  # cut before the limit
        (1, 4, 4, False, -0.25),  # a cache as long as the limit: (0 - 1) / 4
    ],
)
def test_penalty_is_zero_then_linear_then_minus_one(
    num_tokens: int, limit: int, cache: int, truncated: bool, expected: float
):
    got = dapo_penalty(num_tokens, max_new_tokens=limit, cache_length=cache, truncated=truncated)
    assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("num_tokens", "earned", "expected"),
    [
        # L = 100, C = 20. Right answers (1) and wrong ones (0): the same line, then the whole reward goes.
        (80, 1.0, 0.0),
        (90, 1.0, -0.5),
        (90, 0.0, -0.5),
        (99, 1.0, -0.95),
        (100, 1.0, -1.0),
        (100, 0.0, 0.0),
    ],
)
def test_at_the_limit_the_whole_reward_goes_and_before_it_the_line_applies(
    num_tokens: int, earned: float, expected: float
):
    got = zero_at_limit_penalty(
        num_tokens, max_new_tokens=100, cache_length=20, truncated=False, earned=earned, has_answer=True
    )
    assert got == pytest.approx(expected, abs=1e-12)
