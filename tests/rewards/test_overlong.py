"""DAPO equation 13, and the variant that zeroes the reward, at and beside their boundaries."""

import pytest

from async_rl.rewards.registry import dapo_penalty, zero_at_limit_penalty


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
    got = dapo_penalty(num_tokens, max_new_tokens=100, cache_length=20, truncated=False)
    assert got == pytest.approx(expected, abs=1e-12)


def test_an_answer_cut_before_the_limit_gets_the_full_penalty():
    assert dapo_penalty(10, max_new_tokens=100, cache_length=20, truncated=True) == -1.0


def test_a_cache_as_long_as_the_limit_punishes_from_the_first_token():
    # L = C = 4: (0 - 1) / 4.
    assert dapo_penalty(1, max_new_tokens=4, cache_length=4, truncated=False) == -0.25


@pytest.mark.parametrize(("num_tokens", "limit", "cache"), [(-1, 10, 2), (1, 0, 2), (1, 10, 0)])
def test_impossible_lengths_are_refused(num_tokens: int, limit: int, cache: int):
    with pytest.raises(ValueError, match="expected max_new_tokens"):
        dapo_penalty(num_tokens, max_new_tokens=limit, cache_length=cache, truncated=False)


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


def test_the_line_is_for_texts_that_hold_an_answer():
    got = zero_at_limit_penalty(90, max_new_tokens=100, cache_length=20, truncated=False, earned=0.0, has_answer=False)
    assert got == 0.0


def test_without_the_line_the_reward_is_still_zero_at_the_limit():
    for num_tokens, truncated, expected in ((99, False, 0.0), (100, False, -1.0), (50, True, -1.0)):
        got = zero_at_limit_penalty(
            num_tokens, max_new_tokens=100, cache_length=None, truncated=truncated, earned=1.0, has_answer=True
        )
        assert got == expected
