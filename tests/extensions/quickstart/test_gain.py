"""What asynchrony gained, by hand."""

from __future__ import annotations

from pathlib import Path

from async_rl.extensions.insight.comparison.summary import RunSummary, summarise
from async_rl.extensions.quickstart.gain import estimated_gain, measured_gain
from tests.extensions.insight.runs import a_run, step_row, write_run


def idle_run(path: Path, learner: float, generators: float) -> RunSummary:
    """A run of half a second a step, in which both sides were idle for these shares."""
    figures = {"idle__learner": learner, "idle__generators": generators, "time__step_s": 0.5}
    return summarise(write_run(path, [step_row(step, **figures) for step in range(1, 11)]))


def test_the_estimate_adds_the_time_in_which_both_worked(tmp_path: Path):
    # Both worked in 1 - 0.3 - 0.2 = half of the time, so taking turns costs 1.5 times as much: 2 steps/s become 1.33.
    line = estimated_gain(idle_run(tmp_path / "run", 0.3, 0.2))
    assert "(estimate): 2 steps/s instead of 1.33 or less at queue.max_staleness = 0 (--compare measures it)" in line
    # 1 - 0.7 - 0.6 is negative: both were idle at once, in at least 0.3 of the time. It is never a loss.
    assert "2 steps/s instead of 2 or less " in estimated_gain(idle_run(tmp_path / "idle", 0.7, 0.6))


def test_a_run_without_asynchrony_or_figures_has_no_estimate(tmp_path: Path):
    assert "nothing, because queue.max_staleness = 0" in estimated_gain(a_run(tmp_path / "on-policy", 0, 1.0))
    assert "unknown" in estimated_gain(a_run(tmp_path / "no-idle", 4, 1.0))


def test_the_measured_gain_is_the_ratio_of_the_speeds(tmp_path: Path):
    # 2 and 1.25 steps/s.
    assert measured_gain(a_run(tmp_path / "run", 4, 0.5), a_run(tmp_path / "run-on-policy", 0, 0.8)) == (
        "what asynchrony gained (measured): 2 steps/s instead of 1.25 at queue.max_staleness = 0, 1.60 times as many"
    )
