"""DAPO equation 13 at and beside its boundaries."""

import pytest

from async_rl.rewards.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        # L = 100, C = 20: free up to 80; then (80 - n) / 20; -1 from 100 on.
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.05),
        (90, -0.5),
        (99, -0.95),
        (100, -1.0),
        (101, -1.0),
    ],
)
def test_penalty_is_zero_then_linear_then_minus_one(num_tokens: int, expected: float):
    got = overlong_penalty(num_tokens, max_new_tokens=100, cache_length=20, truncated=False)
    assert got == pytest.approx(expected, abs=1e-12)


def test_an_answer_cut_before_the_limit_gets_the_full_penalty():
    assert overlong_penalty(10, max_new_tokens=100, cache_length=20, truncated=True) == -1.0


def test_a_cache_as_long_as_the_limit_punishes_from_the_first_token():
    # L = C = 4: (0 - 1) / 4.
    assert overlong_penalty(1, max_new_tokens=4, cache_length=4, truncated=False) == -0.25


@pytest.mark.parametrize(("num_tokens", "limit", "cache"), [(-1, 10, 2), (1, 0, 2), (1, 10, 0)])
def test_impossible_lengths_are_refused(num_tokens: int, limit: int, cache: int):
    with pytest.raises(ValueError, match="expected max_new_tokens"):
        overlong_penalty(num_tokens, max_new_tokens=limit, cache_length=cache, truncated=False)
