"""Whether a run's answers have become worse: a quarter of the best accuracy, and six standard errors."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from async_rl.run.figures.decline import Decline, Fall


def first_fall(accuracies: list[float]) -> Fall | None:
    decline = Decline()
    found = (decline.add_step(step, accuracy) for step, accuracy in enumerate(accuracies, 1))
    return next((fall for fall in found if fall is not None), None)


def test_a_fall_of_the_mean_of_eight_steps_is_found_as_soon_as_it_is_large_enough():
    # Steps of 0.6 and 0.4 in turn: half a squared difference is 0.02. After eight such steps and n of 0, the mean of
    # the newest eight is (8 - n) / 16 (n even). With eight steps of 0: 14 differences of 0.2, one of 0.4 and seven
    # of 0 are 0.02 * (7 + 4) / 15 = 0.0147, the error of the difference is sqrt(2 * 0.0147 / 8) = 0.061, and 0.5 are
    # eight of them.
    fall = first_fall([0.6, 0.4] * 4 + [0.0] * 8)
    assert fall == Fall(16, 0.5, 0.0, "means of steps 1 to 8 and 9 to 16")
    # 0.25 are half of 0.5, but only four errors.
    assert first_fall([0.6, 0.4] * 4 + [0.35, 0.15] * 4) is None


def test_a_fall_that_is_certain_but_small_is_none():
    # No noise at all, so any fall is certain: 0.76 of the best is kept, or 0.74.
    assert first_fall([0.5] * 16 + [0.38] * 64) is None
    fall = first_fall([0.5] * 16 + [0.37] * 64)
    assert fall is not None
    assert math.isclose(fall.before, 0.5)


def test_chance_makes_no_fall():
    """20 runs of 1,000 steps with 8 groups of 8 answers, whose prompts differ much and whose policy never changes."""
    random = Random(0)
    for _ in range(20):
        steps = [
            sum(sum(random.random() < chance for _ in range(8)) for chance in (random.random() for _ in range(8))) / 64
            for _ in range(1000)
        ]
        assert first_fall(steps) is None


def test_evaluations_are_compared_by_their_errors():
    decline = Decline()
    assert decline.add_evaluation("math", 0, 0.30, 0.02) is None
    # The difference's error is 0.0283. Six of them are 0.1697.
    assert decline.add_evaluation("math", 10, 0.131, 0.02) is None
    assert decline.add_evaluation("other", 20, 0.10, 0.02) is None, "another set"
    assert decline.add_evaluation("math", 20, 0.129, 0.02) == Fall(
        20, 0.30, 0.129, "evaluations on math at steps 0 and 20"
    )
    # 0.02 more of the rows may be right: they have no answer, as in an outage.
    assert decline.add_evaluation("math", 30, 0.12, 0.02, missing=0.02) is None
    assert decline.add_evaluation("math", 40, 0.12, 0.02, missing=0.01) is not None
    large = Decline()
    large.add_evaluation("math", 0, 0.30, 0.001)
    assert large.add_evaluation("math", 10, 0.23, 0.001) is None, "certain, but a quarter is not lost"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.data())
def test_a_run_that_goes_back_and_trains_the_same_again_finds_the_same(accuracies: list[float], data: st.DataObject):
    straight, going_back = Decline(), Decline()
    expected = [straight.add_step(step, accuracy) for step, accuracy in enumerate(accuracies)]
    for step, _ in enumerate(accuracies):
        going_back.add_step(step, 0.5)
    back_to = data.draw(st.integers(0, len(accuracies)))
    going_back.forget_from(0)
    for step in range(back_to):
        going_back.add_step(step, accuracies[step])
    for step in range(back_to, len(accuracies)):
        going_back.add_step(step, 1.0)
    going_back.forget_from(back_to)
    found = [going_back.add_step(step, accuracies[step]) for step in range(back_to, len(accuracies))]
    for got, wanted in zip(found, expected[back_to:], strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or wanted is None or (got.where == wanted.where and math.isclose(got.now, wanted.now))
