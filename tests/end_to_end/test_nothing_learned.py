"""A run that can't learn: it says so while it runs, and ends with no success."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import check_ledger, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.slow
def test_data_that_nothing_can_be_learned_from_is_told_soon_and_is_no_success(tmp_path: Path):
    # A model with random weights is never right, so the usual filter takes every group.
    raw = tiny_config(tmp_path, write_tiny_task(tmp_path, num_rows=10), queue={"filter_range": [0.01, 0.99]})
    raw["learner"]["groups_per_step"], raw["data"]["eval"], raw["data"]["epochs"] = 8, {}, 2
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(write_config(tmp_path / "config.toml", raw)))
        assert launch.wait() == 1
    run_dir = tmp_path / "run"
    assert "not finished: 0 steps" in launch.log
    reason = "this run has trained nothing: the data has ended (data.epochs); prompts: 20 filtered"
    assert reason in launch.log
    assert 'One answer ends: "' in launch.log
    notes = [line for line in launch.log.splitlines() if line.startswith("note: all ")]
    assert len(notes) == 1, "while it runs, and not again at the end"
    assert launch.log.index(notes[0]) < launch.log.index("not finished: 0 steps")
    assert check_ledger(run_dir)["groups"]["filtered"] == 20
    assert (steps(run_dir), (run_dir / "export").exists(), (run_dir / "finished.json").exists()) == ([], False, False)
