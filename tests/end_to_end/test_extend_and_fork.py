"""A finished run is extended with another bound, then forked: what is trained goes on, and nothing is trained twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from async_rl.extensions.insight.comparison.summary import summarise
from async_rl.run.config_changes import ConfigChange, read_changes
from async_rl.run.directory import RunDir
from tests.end_to_end.faults_harness import fault_config, trained_rows
from tests.end_to_end.harness import check_ledger, roles, steps

NUM_ROWS = 24


@pytest.mark.slow
def test_a_run_is_extended_with_another_bound_and_then_forked_from_an_older_step(tmp_path: Path):
    config = fault_config(tmp_path, num_rows=NUM_ROWS, learner={"steps": 4}, checkpoint={"every": 2, "keep_last": 9})
    run, fork = RunDir(tmp_path / "run"), RunDir(tmp_path / "fork")
    with roles(tmp_path / "logs") as start:
        start("first", "launch", str(config)).succeed()
        assert steps(run.path) == [1, 2, 3, 4]
        again = ("--set", "learner.steps=8", "--set", "queue.max_staleness=0")
        extended = start("extended", "launch", str(config), *again)
        extended.succeed()
        options = ("--set", f"run.dir={fork.path}", "--set", "learner.steps=6", "--set", "loss.clip_high=0.3")
        forked = start("forked", "launch", str(config), "--from", f"{run.path}@2", *options)
        forked.succeed()

    assert "changed since the last launch: learner.steps: 4 -> 8\n" in extended.log
    assert steps(run.path) == list(range(1, 9))
    assert run.is_finished
    changed = {"learner.steps": (4, 8), "queue.max_staleness": (load_config(config).queue.max_staleness, 0)}
    assert read_changes(run) == [ConfigChange(4, changed)]
    positions = trained_positions(run)
    assert len(positions) == len(set(positions)) == 16, "no prompt is trained twice in the epoch, none is passed over"
    check_ledger(run.path)

    assert "forked from" in forked.log
    assert "changed since step 2: loss.clip_high: 0.28 -> 0.3\n" in forked.log
    assert steps(fork.path) == [3, 4, 5, 6]
    assert json.loads(fork.origin.read_text())["step"] == 2
    assert read_changes(fork) == [ConfigChange(2, {"learner.steps": (4, 6), "loss.clip_high": (0.28, 0.3)})]
    positions = trained_positions(fork)
    assert len(positions) == len(set(positions)) == 8
    assert not set(positions) & set(trained_positions(run)[:4]), "the fork keeps its place in the data"
    check_ledger(fork.path)
    found = summarise(fork.path)
    assert (found.first_step, found.num_steps) == (3, 4)


def trained_positions(run: RunDir) -> list[int]:
    return [position for row in trained_rows(run.path) for position, _ in row["groups"]]
