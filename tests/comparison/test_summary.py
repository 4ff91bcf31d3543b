"""The figures of a run, by hand."""

import json
from pathlib import Path

import pytest

from async_rl.comparison.advice import advise
from async_rl.comparison.summary import Evaluation, summarise
from async_rl.comparison.table import comparison_lines
from async_rl.errors import RunError
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
    assert found.overlap == pytest.approx((8 * 0.5 + 2 * 1.0) / 10)
    assert found.idle_learner == 0.0
    assert found.idle_generators is None
    assert found.ess == pytest.approx((800 * 1.0 + 300 * 0.5) / 1100)
    assert found.staleness_max == 4


def test_keys_that_changed_during_a_run_are_named(tmp_path: Path):
    run = write_run(tmp_path / "run", [step_row(1)])
    change = {"step": 40, "changed": {"learner.steps": [40, 80], "queue.max_staleness": [4, 16]}}
    (run / "config_changes.jsonl").write_text(json.dumps(change) + "\n")
    found = summarise(run)
    assert found.changes == [ConfigChange(40, {"learner.steps": (40, 80), "queue.max_staleness": (4, 16)})]
    lines = comparison_lines([found], advise([found]))
    assert "  run: queue.max_staleness was 4 until step 40, then 16" in lines
    assert not [line for line in lines if "learner.steps" in line]


def test_the_mismatch_of_a_lag_is_a_mean_over_its_tokens(tmp_path: Path):
    rows = [
        step_row(1),
        step_row(2, mismatch_kl__lag_0=0.1, lag_0__tokens=10, mismatch_kl__lag_3=0.7, lag_3__tokens=5),
        step_row(3, mismatch_kl__lag_0=0.4, lag_0__tokens=30),
    ]
    assert summarise(write_run(tmp_path / "run", rows)).mismatch_by_lag == pytest.approx({0: 0.325, 3: 0.7})


def test_only_losses_by_age_count_as_dropped_and_masked(tmp_path: Path):
    # 2 + 1 of 70 + 20 + 10 groups; 5 of 90 + 10 tokens.
    ledger = {
        "groups": {"trained": 70, "filtered": 20, "dropped": {"stale": 2, "too_slow": 1, "expired": 7}},
        "tokens": {"trained": 90, "masked": {"stale": 5, "truncated": 5}},
    }
    found = summarise(write_run(tmp_path / "run", [step_row(1)], ledger=ledger))
    assert (found.dropped, found.masked) == (0.03, 0.05)


def test_evaluations_are_in_the_order_of_their_steps(tmp_path: Path):
    rows = [eval_row(0, 0.25, time_s=3.0), step_row(1), eval_row(1, 0.5, 0.02, time_s=9.0)]
    found = summarise(write_run(tmp_path / "run", rows)).evaluations
    assert found == {"math": [Evaluation(0, 3.0, 0.25, 0.01), Evaluation(1, 9.0, 0.5, 0.02)]}


def test_what_is_no_run_or_has_no_step_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match=r"expected a run directory \(with config\.toml and metrics\.jsonl\), got none"):
        summarise(tmp_path)
    with pytest.raises(RunError, match=r"expected a run that has made a step, got none yet"):
        summarise(write_run(tmp_path / "run", [eval_row(0, 0.25)]))
