"""Runs that can't learn: they say so soon, in the terminal, in status and in the summary, and end with no success."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import check_ledger, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


def hopeless(directory: Path, **sections: dict[str, Any]) -> Path:
    """The config of a model with random weights, which is never right, under the usual filter. 16 groups a step."""
    raw = tiny_config(directory, write_tiny_task(directory, num_rows=10), queue={"filter_range": [0.01, 0.99]})
    raw["learner"]["groups_per_step"], raw["data"]["eval"] = 16, {}
    for section, keys in sections.items():
        raw.setdefault(section, {}).update(keys)
    return write_config(directory / "config.toml", raw)


@pytest.mark.slow
def test_data_that_nothing_can_be_learned_from_is_no_success(tmp_path: Path):
    config = hopeless(tmp_path, data={"epochs": 1})
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config))
        assert launch.wait() == 1
    run_dir = tmp_path / "run"
    assert "not finished: 0 steps" in launch.log
    reason = (
        "this run has trained nothing: the data has ended (data.epochs); prompts: 10 filtered (10 with only wrong "
        "answers, 0 with only right ones). all 10 groups since the run began have only wrong answers"
    )
    assert reason in launch.log
    assert 'One answer ends: "' in launch.log
    assert check_ledger(run_dir)["groups"]["filtered"] == 10
    assert (steps(run_dir), (run_dir / "export").exists(), (run_dir / "finished.json").exists()) == ([], False, False)


@pytest.mark.slow
def test_two_batches_of_wrong_answers_are_told_in_the_terminal_in_status_and_in_the_summary(tmp_path: Path):
    config = hopeless(tmp_path)
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config))
        wait_until("a note", lambda: "note: all " in launch.log)
        status = start("status", "status", str(tmp_path / "run"), "--json")
        status.succeed()
        launch.kill(signal.SIGINT)
        assert launch.wait() == 130
    assert "groups since the run began have only wrong answers" in status.log
    notes = [line for line in launch.log.splitlines() if line.startswith("note: all ")]
    assert len(notes) == 2, "one while it runs, and one in the summary"
