"""``async-rl sweep`` is stopped in a run; the same command goes on there, and compares the runs."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import pytest

from async_rl.extensions.insight.comparison.summary import summarise
from tests.end_to_end.faults_harness import fault_config, kill_all, trained_rows
from tests.end_to_end.harness import processes_of, roles, wait_until

NUM_ROWS = 24


@pytest.mark.long
def test_a_sweep_that_gets_sigterm_saves_its_run_and_the_same_command_goes_on(tmp_path: Path):
    config = fault_config(tmp_path, num_rows=NUM_ROWS, checkpoint={"every": 0})
    marker = f"ASYNC_RL_TEST={tmp_path}"
    runs = [tmp_path / "run-sweep" / f"max_staleness={bound}" for bound in (0, 2)]
    command = ("sweep", str(config), "--over", "queue.max_staleness=0,2")
    with roles(tmp_path / "logs") as start, contextlib.ExitStack() as at_end:
        at_end.callback(kill_all, marker)
        sweep = start("sweep", *command, env={"ASYNC_RL_TEST": str(tmp_path)})
        wait_until("steps of the second run", lambda: len(trained_rows(runs[1])) >= 3, deadline_s=150)
        sweep.kill(signal.SIGTERM)
        assert sweep.wait() == 143
        assert processes_of(marker) == []
        finished = json.loads((runs[0] / "finished.json").read_text())
        assert not (runs[1] / "finished.json").exists()
        assert (runs[1] / "checkpoints" / "latest").exists()
        again = start("again", *command)
        again.succeed()
    assert json.loads((runs[0] / "finished.json").read_text()) == finished
    found = [summarise(run) for run in runs]
    assert [(run.bound, run.num_steps, run.is_finished) for run in found] == [(0, 12, True), (2, 12, True)]
    assert "Set queue.max_staleness = " in again.log
    assert (tmp_path / "run-sweep" / "compare.png").read_bytes().startswith(b"\x89PNG")
