"""``queue.adaptive`` through the trainer's loop: decided, sent, recorded, and kept over the learner's death."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.learner.checkpoints.files import BoundState, TrainerState
from async_rl.learner.interface import UpdateStats
from async_rl.learner.losses.diagnostics import COLUMNS
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.core import persistence
from async_rl.run.metrics import METRIC_KEYS
from async_rl.run.step_log import read_rows
from tests.learner.loop.test_trainer import Run, ScriptedEngine, make_run


@dataclass
class OverloadedEngine(ScriptedEngine):
    """Every step has an effective sample size of 0.5."""

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        stats = super().update(sequences, version=version)
        return replace(stats, ess=0.5, by_lag=np.zeros((1, COLUMNS)))


def adaptive_run(directory: Path, **sections: Any) -> Run:
    queue = {"max_staleness": 4, "run_ahead": "bound", "adaptive": True, **sections.pop("queue", {})}
    run = make_run(directory, num_rows=400, queue=queue, **{"learner": {"steps": 14}, **sections})
    run.engine = OverloadedEngine()
    return run


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.path / "metrics.jsonl") if "version" in row]


def test_a_overloaded_run_lowers_its_bound_and_its_samples_get_younger(tmp_path: Path):
    run = adaptive_run(tmp_path)
    state = run.start()
    rows = rows_of(run)
    # Ages 0, 1, 2, ... as the first leases are trained. Those of 1 and 2 strain: 2 // 2 = 1, then 4 + 1 steps settle.
    bounds = [row["staleness/bound"] for row in rows]
    assert bounds[:3] == [4, 4, 1]
    assert [row["staleness/decision"] for row in rows[:3]] == [0, 0, -3]
    assert bounds[-1] == 0
    assert state.bound_state is not None
    assert state.bound_state.bound == 0
    # What was queued under the old bound is trained as old as it is; after it nothing is older than the bound.
    assert max(row["staleness/max"] for row in rows) == 4
    assert rows[-1]["staleness/max"] == 0
    assert run.dropped == {}
    assert {"staleness/bound", "staleness/decision"} <= METRIC_KEYS.keys()


def test_the_bound_goes_on_where_the_checkpoint_left_it(tmp_path: Path):
    whole = adaptive_run(tmp_path / "whole")
    whole.start()
    killed = adaptive_run(tmp_path / "killed")
    # The checkpoint is of 4 steps: the bound is 1, and settling.
    killed.dies("ack", 5)
    killed.start()
    assert [row["staleness/bound"] for row in rows_of(killed)] == [row["staleness/bound"] for row in rows_of(whole)]


def test_without_a_checkpoint_the_bound_starts_over(tmp_path: Path):
    run = adaptive_run(tmp_path, checkpoint={"every": 0})
    run.dies("ack", 6)
    assert persistence.status(run.queue_state, 0.0)["lease_bound"] < 4
    run.start()
    assert rows_of(run)[0]["staleness/bound"] == 4


def test_a_fixed_bound_is_neither_sent_nor_recorded(tmp_path: Path):
    run = make_run(tmp_path)
    run.engine = OverloadedEngine()
    assert run.start().bound_state is None
    assert not any("staleness/bound" in row for row in rows_of(run))


def test_the_state_of_the_bound_survives_as_plain_data():
    for bound_state in (None, BoundState(3, -1, 2)):
        state = TrainerState(bound_state=bound_state)
        assert TrainerState.from_plain(state.to_plain()).fork().bound_state == bound_state
