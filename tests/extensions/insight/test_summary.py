"""The figures of a run, by hand."""

import json
from pathlib import Path

import pytest

from async_rl.extensions.insight.comparison.advice import advise
from async_rl.extensions.insight.comparison.summary import summarise
from async_rl.extensions.insight.comparison.table import comparison_lines
from async_rl.run.config_changes import ConfigChange

from .runs import eval_row, step_row, write_run


def test_means_are_weighted_by_time_and_by_tokens_and_leave_the_warm_up_out(tmp_path: Path):
    # Of ten steps the first is warm-up. Of the other nine, one takes 2 s and has 300 tokens.
    rows = [step_row(1, idle__learner=1.0, time__step_s=50.0, ratio__ess=0.1)]
    rows += [step_row(step, overlap__efficiency=0.5) for step in range(2, 10)]
    rows += [
        step_row(10, overlap__efficiency=1.0, time__step_s=2.0, tokens__trained=300, ratio__ess=0.5, staleness__max=4)
    ]
    found = summarise(write_run(tmp_path / "run", rows))
    assert (found.num_steps, found.bound, found.is_finished) == (10, 4, False)
    assert found.steps_per_s == pytest.approx(9 / 10)
    assert found.means["overlap/efficiency"] == pytest.approx((8 * 0.5 + 2 * 1.0) / 10)
    assert found.means["idle/learner"] == 0.0
    assert found.means["idle/generators"] is None
    assert found.means["ratio/ess"] == pytest.approx((800 * 1.0 + 300 * 0.5) / 1100)
    assert found.means["staleness/max"] == 4


def test_keys_that_changed_during_a_run_are_named(tmp_path: Path):
    run = write_run(tmp_path / "run", [step_row(1)])
    change = {"step": 40, "changed": {"learner.steps": [40, 80], "queue.max_staleness": [4, 16]}}
    (run / "config_changes.jsonl").write_text(json.dumps(change) + "\n")
    found = summarise(run)
    assert found.changes == [ConfigChange(40, {"learner.steps": (40, 80), "queue.max_staleness": (4, 16)})]
    lines = comparison_lines([found], advise([found]))
    assert "  run: queue.max_staleness was 4 until step 40, then 16" in lines
    assert not [line for line in lines if "learner.steps" in line]


def test_only_losses_by_age_count_as_dropped_and_masked(tmp_path: Path):
    # 2 + 1 of 70 + 20 + 10 groups; 5 of 90 + 10 tokens.
    ledger = {
        "groups": {"trained": 70, "filtered": 20, "dropped": {"stale": 2, "too_slow": 1, "expired": 7}},
        "tokens": {"trained": 90, "masked": {"stale": 5, "truncated": 5}},
    }
    found = summarise(write_run(tmp_path / "run", [step_row(1)], ledger=ledger))
    assert (found.dropped, found.masked) == (0.03, 0.05)


def test_seconds_and_speed_leave_the_start_up_out(tmp_path: Path):
    # The first batch is there after 12 s: start-up until 10 s, then step 1 waits 2 s of its 3 s. A restart after step 2
    # (14 s) takes until 24 s, in which step 3 waits 9 s of its 10 s; so 10 s are no training.
    rows = [
        eval_row(0, 0.2, time_s=10.0),
        step_row(1, time_s=13.0, time__step_s=3.0, time__wait_s=2.0),
        step_row(2, time_s=14.0, time__step_s=1.0, time__wait_s=0.5),
        step_row(3, time_s=25.0, time__step_s=10.0, time__wait_s=9.0),
        eval_row(2, 0.3, time_s=20.0),
        step_row(4, time_s=26.0, time__step_s=1.0, time__wait_s=0.0),
        eval_row(4, 0.4, time_s=26.5),
    ]
    found = summarise(write_run(tmp_path / "run", rows, starts=(1, 3)))
    assert [(one.step, one.time_s) for one in found.evaluations["math"]] == [(0, 0.0), (2, 2.0), (4, 4.5)]
    assert [time_s for _, time_s, _ in found.curve] == [1.0, 2.0, 3.0, 4.0]
    assert found.steps_per_s == pytest.approx(1.0)  # of steps 2 and 4


def test_a_fork_has_its_own_steps_and_seconds_and_names_its_origin(tmp_path: Path):
    rows = [
        step_row(41, time_s=16.0, time__step_s=5.0, time__wait_s=4.5), step_row(42, time_s=17.0), eval_row(42, 0.5),
    ]  # fmt: skip
    rows[-1]["time_s"] = 17.5
    found = summarise(write_run(tmp_path / "fork", rows, starts=(41,), forked_at=40))
    assert (found.first_step, found.num_steps, found.last_step) == (41, 2, 42)
    assert found.evaluations["math"][0].time_s == pytest.approx(2.0)
    lines = comparison_lines([found], advise([found]))
    assert "  fork is a fork of source@40: its steps are 41 to 42, and its seconds begin" in lines
    assert "    there" in lines


def test_the_error_of_the_speed_is_that_of_blocks_of_steps(tmp_path: Path):
    # 18 steps without two of warm-up: eight blocks of two steps, four of 0.5 s and then four of 1.5 s each. Their mean
    # is 1 s, their standard deviation 0.5 x sqrt(8 / 7) = 0.5345 s, so the error is 0.5345 / sqrt(8) = 0.189 of 1.
    rows = [step_row(step, time__step_s=0.5 if step <= 10 else 1.5) for step in range(1, 19)]
    found = summarise(write_run(tmp_path / "run", rows))
    assert found.steps_per_s == pytest.approx(1.0)
    assert found.speed_error == pytest.approx(0.189, abs=1e-3)
    assert summarise(write_run(tmp_path / "short", rows[:7])).speed_error is None
