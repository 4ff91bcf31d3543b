"""Means over the runs of one bound, and their errors, by hand."""

import math
from pathlib import Path

import pytest

from async_rl.extensions.insight.comparison.points import points_of

from .runs import a_run, eval_row


def test_the_error_of_a_bound_is_the_spread_of_its_runs_but_at_least_the_median(tmp_path: Path):
    # Steps/s of 0.9, 1, 1.1 at bound 0: a standard deviation of 0.1 of the mean; none at bound 4. The median is 0.05.
    # So the errors of the means of three runs are 0.1 / sqrt(3) = 0.0577 of 1, and 0.05 / sqrt(3) = 0.0289 of 2.
    speeds = {0: (0.9, 1.0, 1.1), 4: (2.0, 2.0, 2.0)}
    runs = [
        a_run(tmp_path / f"{bound}-{seed}", bound, 1 / speed, seed=seed, more=[eval_row(10, 0.8 + 0.1 * (seed == 1))])
        for bound, of_bound in speeds.items()
        for seed, speed in enumerate(of_bound)
    ]
    low, high = points_of(runs)
    assert (low.speed_error, high.speed_error) == pytest.approx((0.0577, 0.0577), abs=1e-4)
    # Accuracies 0.8, 0.9, 0.8 in both: the standard deviation is 0.0577, the error of the mean 0.0333.
    assert (low.accuracy, low.error) == pytest.approx((0.8333, 0.0333), abs=1e-4)
    # With two runs at each bound there are 2 degrees of freedom, so the error is at least 0.1 / sqrt(2).
    few = points_of([runs[0], runs[1], runs[3], runs[4]])
    assert few[1].speed_error == pytest.approx(2.0 * 0.0707, abs=1e-4)


def test_the_error_of_a_single_run_is_that_of_its_steps_but_at_least_ten_percent(tmp_path: Path):
    low, high = points_of([a_run(tmp_path / "0", 0, 1.0), a_run(tmp_path / "4", 4, 0.5)])
    assert (low.speed_error, high.speed_error) == pytest.approx((0.1, 0.2))
    short = points_of([a_run(tmp_path / "1", 0, 1.0, num_steps=3), a_run(tmp_path / "5", 4, 0.5, num_steps=3)])
    assert short[0].speed_error == math.inf


def test_the_set_that_all_runs_answered_most_often_is_judged(tmp_path: Path):
    # "final" comes first by name, and was answered once, before the first step.
    more = [{"step": 0, "time_s": 0.0, "eval/final/accuracy": 0.3}, eval_row(0, 0.3), eval_row(10, 0.9)]
    (point,) = points_of([a_run(tmp_path / "0", 0, 1.0, more=more)])
    assert (point.first, point.accuracy) == (0.3, 0.9)
