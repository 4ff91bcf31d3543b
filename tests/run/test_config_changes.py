"""The record of config keys that changed when a run was resumed."""

from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.run.config_changes import ConfigChange, read_changes, record_change
from async_rl.run.directory import RunDir
from tests.config.made import a_config


def bound(eta: int, **sections: dict[str, Any]) -> Config:
    return a_config(queue={"max_staleness": eta}, **sections)


def test_each_change_is_recorded_once_with_its_step(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    assert record_change(run_dir, 10, bound(4), bound(4, generator={"count": 3})) == ConfigChange(10, {})
    assert not run_dir.config_changes.exists()
    first = ConfigChange(10, {"queue.max_staleness": (4, 16)})
    for _ in range(2):  # a learner that died before its next checkpoint compares with the same one again
        assert record_change(run_dir, 10, bound(4), bound(16)) == first
    second = ConfigChange(20, {"optimizer.lr": (1e-06, 0.5), "queue.max_staleness": (16, 1)})
    assert record_change(run_dir, 20, bound(16), bound(1, optimizer={"lr": 0.5})) == second
    code = record_change(run_dir, 30, bound(1), bound(1), {"mine.py:score": ("0a1b", "2c3d")})
    assert code.lines == ["from step 31 on: mine.py:score: '0a1b' -> '2c3d'"]
    assert read_changes(run_dir) == [first, second, code]


def test_a_run_that_goes_back_forgets_the_changes_after_its_checkpoint(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    for step, old, new in ((10, 4, 16), (20, 16, 1), (30, 1, 2)):
        record_change(run_dir, step, bound(old), bound(new))
    record_change(run_dir, 20, bound(16), bound(2))
    assert [(c.step, c.changed["queue.max_staleness"]) for c in read_changes(run_dir)] == [(10, (4, 16)), (20, (16, 2))]
    record_change(run_dir, 0, bound(2), bound(2))
    assert read_changes(run_dir) == []
