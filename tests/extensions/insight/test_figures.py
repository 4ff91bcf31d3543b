"""What a page shows of a run, by hand."""

import json
import socket
from pathlib import Path

import pytest

from async_rl.errors import RunError
from async_rl.extensions.insight.report.figures import MAX_BARS, MAX_POINTS, lags, read_run, run_state, timeline
from async_rl.run.directory import RunDir
from async_rl.run.lock import acquire
from tests.extensions.insight.runs import step_row, write_run

from .pages import a_run


def test_shares_of_a_bar_add_up_to_one():
    # Of 2 s: 0.5 s training, 1 s waiting, 0.1 s publishing, 0.2 s for a checkpoint; 0.2 s are something else.
    row = step_row(
        1, time__step_s=2.0, time__train_s=0.5, time__wait_s=1.0, time__publish_s=0.1, time__checkpoint_s=0.2
    )
    row |= {"idle/generators": 0.5, "idle/grading": 0.2, "idle/leases": 0.1, "time/grading_s": 1.5}
    found = timeline([row])
    assert {name: shares[0] for name, shares in found["learner"].items()} == pytest.approx(
        {"train": 0.25, "wait": 0.5, "publish": 0.05, "checkpoint": 0.1, "other": 0.1}
    )
    assert {name: shares[0] for name, shares in found["generators"].items()} == pytest.approx(
        {"decode": 0.5, "grading": 0.2, "environment": 0, "weights": 0, "leases": 0.1, "other": 0.2}
    )
    assert (found["begin"], found["end"], found["grading"]) == ([-1.0], [1.0], [0.75])
    # A step without a heartbeat has the reading of the next one: until then generators awaited scores for 1.5 s in 3 s.
    rows = [step_row(1), step_row(2, time__step_s=3.0, idle__generators=0.4, time__grading_s=1.5), step_row(3)]
    found = timeline(rows)
    assert found["generators"]["decode"] == [0.6, 0.6, None]
    assert found["grading"] == [0.5, 0.5, 0.0]


def test_figures_of_a_staleness_are_means_over_its_tokens():
    rows = [
        step_row(1, lag_0__tokens=10, mismatch_kl__lag_0=0.1, lag_2__tokens=5),
        step_row(2, lag_0__tokens=30, mismatch_kl__lag_0=0.5, lag_0__ess=0.8),
    ]
    zero, two = lags(rows)
    assert (zero["lag"], zero["tokens"], zero["kl"], zero["ess"]) == (0, 40, pytest.approx(0.4), 0.8)
    assert (two["lag"], two["tokens"], two["kl"]) == (2, 5, None)


def test_what_launch_noted_while_the_run_went_is_among_the_notes(tmp_path: Path):
    ledger = {
        "groups": {"issued": 4, "in_flight": 0, "queued": 0, "taken": 0, "trained": 4, "filtered": 0, "dropped": {}},
        "rollouts": {}, "tokens": {}, "group_notes": {"wrong": "all 4 groups have only wrong answers"},
    }  # fmt: skip
    rows = [step_row(step, length__truncated=0.75, masked__truncated=3) for step in range(1, 5)]
    run = write_run(tmp_path / "run", rows, ledger=ledger)
    cut, of_groups = read_run(run)["notes"]
    assert cut["step"] == 3
    assert cut["text"].startswith("75% of the answers of the last 3 steps were cut at")
    assert of_groups == {"step": None, "text": "all 4 groups have only wrong answers"}


def test_a_run_is_read_with_its_evaluations_settings_and_notes(tmp_path: Path):
    found = read_run(a_run(tmp_path / "run", learner={"steps": 9}))
    assert (found["name"], found["step"], found["steps"], found["state"]) == ("run", 4, 9, "not finished")
    assert found["evals"]["math"]["step"] == [0, 4]
    assert found["evals"]["math"]["accuracy"] == [0.25, 0.75]
    assert found["columns"]["step"] == [1, 2, 3, 4]
    assert [note["text"] for note in found["notes"]] == ["wandb did not answer"]
    settings = {row["key"]: row for row in found["settings"]}
    assert (settings["learner.steps"]["value"], settings["learner.steps"]["changed"]) == ("9", True)
    assert settings["optimizer.lr"]["changed"] is False
    assert found["headline"][0] == {"label": "accuracy on math", "value": "0.75", "detail": "from 0.25"}
    (tmp_path / "run" / "config.toml").write_text("[loss]\ngone = 1\n")  # of another version: shown as text
    found = read_run(tmp_path / "run")
    assert (found["settings"], found["config_text"]) == ([], "[loss]\ngone = 1\n")
    found = read_run(write_run(tmp_path / "empty", []))
    assert (found["step"], found["timeline"]["begin"], found["lags"]) == (0, [], [])
    with pytest.raises(RunError, match=r"expected a run directory with config\.toml"):
        read_run(tmp_path)


def test_a_long_run_is_thinned_out(tmp_path: Path):
    found = read_run(write_run(tmp_path / "run", [step_row(step) for step in range(1, 5001)]))
    assert len(found["columns"]["step"]) <= MAX_POINTS + 1
    assert found["columns"]["step"][-1] == 5000
    assert len(found["timeline"]["begin"]) <= MAX_BARS
    assert found["timeline"]["steps"][-1][1] == 5000


def test_a_run_exports_while_a_living_process_writes_the_model(tmp_path: Path):
    run = RunDir(a_run(tmp_path / "run"))
    (run.path / ".export.0123abcd.partial").mkdir()
    lock = acquire(run, "learner")
    assert run_state(run) == "exporting"
    lock.close()
    run.lock.write_text(json.dumps({"pid": 2**30, "host": socket.gethostname(), "role": "learner"}) + "\n")
    assert run_state(run) == "not finished", "its process has died"
    run.mark_finished({"step": 4})
    assert run_state(run) == "finished"
