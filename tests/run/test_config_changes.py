"""The record of config keys that changed when a run was resumed."""

from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import RunError
from async_rl.run.config_changes import ConfigChange, read_changes, record_change
from async_rl.run.directory import RunDir


def bound(eta: int, **sections: dict[str, Any]) -> Config:
    return parse_config(
        {"run": {"dir": "x"}, "model": {"path": "tiny"}, "queue": {"max_staleness": eta}, **sections}, "test"
    )


def test_each_change_is_recorded_once_with_its_step(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    assert record_change(run_dir, 10, bound(4), bound(4, generator={"count": 3})) == ConfigChange(10, {})
    assert not run_dir.config_changes.exists()
    first = ConfigChange(10, {"queue.max_staleness": (4, 16)})
    for _ in range(2):  # a learner that died before its next checkpoint compares with the same one again
        assert record_change(run_dir, 10, bound(4), bound(16)) == first
    second = ConfigChange(20, {"optimizer.lr": (1e-06, 0.5), "queue.max_staleness": (16, 1)})
    assert record_change(run_dir, 20, bound(16), bound(1, optimizer={"lr": 0.5})) == second
    assert read_changes(run_dir) == [first, second]


def test_changed_code_is_recorded_with_its_step_like_a_key(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    change = record_change(run_dir, 10, bound(4), bound(4), {"mine.py:score": ("0a1b", "2c3d")})
    assert read_changes(run_dir) == [change]
    assert change.lines == ["from step 11 on: mine.py:score: '0a1b' -> '2c3d'"]


def test_a_run_that_goes_back_forgets_the_changes_after_its_checkpoint(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    for step, old, new in ((10, 4, 16), (20, 16, 1), (30, 1, 2)):
        record_change(run_dir, step, bound(old), bound(new))
    record_change(run_dir, 20, bound(16), bound(2))
    assert [(c.step, c.changed["queue.max_staleness"]) for c in read_changes(run_dir)] == [(10, (4, 16)), (20, (16, 2))]
    record_change(run_dir, 0, bound(2), bound(2))
    assert read_changes(run_dir) == []


@pytest.mark.parametrize("text", ["x", "{}", '{"step": 1, "changed": {"a": 3}}', "[]"])
def test_a_damaged_record_names_its_file(tmp_path: Path, text: str):
    RunDir(tmp_path).config_changes.write_text(text)
    with pytest.raises(RunError, match=r"config_changes\.jsonl.*delete the file"):
        read_changes(RunDir(tmp_path))
