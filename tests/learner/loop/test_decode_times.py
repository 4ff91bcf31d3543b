"""The line through the times of decode steps."""

from __future__ import annotations

import pytest

from async_rl.learner.loop.decode_times import decode_times
from async_rl.queue.messages import Decoded


def decoded(running: int, step_s: float, num_steps: int) -> Decoded:
    """Decode steps that all have this many sequences and take this long."""
    return Decoded(step_s * num_steps, step_s * num_steps * running, running * num_steps)


def test_the_line_is_that_of_the_measured_steps_whatever_their_numbers():
    steps = [decoded(2**n, 0.02 + 0.001 * 2**n, 10 * 7**n) for n in range(6)]
    assert decode_times(steps) == pytest.approx((0.02, 0.001))


def test_without_a_measurement_there_is_no_line_and_with_one_no_slope():
    assert decode_times([]) is None
    assert decode_times([Decoded(), Decoded()]) is None
    assert decode_times([Decoded(), Decoded(), decoded(5, 0.25, 3)]) == pytest.approx((0.25, 0))


def test_no_part_is_negative():
    # Faster with more sequences: the mean of 3 steps of 0.4 s and one of 0.2 s.
    assert decode_times([decoded(1, 0.4, 3), decoded(2, 0.2, 1)]) == pytest.approx((0.35, 0))
    # A line through (1, 0.1) and (2, 0.4) begins below 0; the best one through 0 has the slope 0.9 / 5.
    assert decode_times([decoded(1, 0.1, 1), decoded(2, 0.4, 1)]) == pytest.approx((0, 0.18))
