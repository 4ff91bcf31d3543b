"""DAPO equation 13 at and beside its boundaries. ``test_math`` has the variant that zeroes the reward."""

import pytest

from async_rl.rewards.registry import dapo_penalty


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
