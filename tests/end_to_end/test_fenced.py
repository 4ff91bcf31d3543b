"""A learner that is stopped, replaced, and woken: it changes no file of the run."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.faults_harness import Gates, fault_config, judge, kill_all, trained_rows
from tests.end_to_end.harness import queue_address, roles, state_of, wait_until
from tests.fault_points import FAULT_POINTS

NUM_ROWS = 120
POINTS = [point for point in FAULT_POINTS if point.startswith("learner.")]
SOME = ["learner.taken", "learner.checkpoint_writing", "learner.checkpoint_written"]
QUEUE_FILES = ("queue", "queue.json", "ledger.json")
"""The queue server writes them, whoever the learner is."""


def digests(run_dir: Path) -> dict[str, str]:
    """Path -> digest of every file that a learner writes. The queue server may log something at any time."""
    names = ((p, p.relative_to(run_dir).parts[0]) for p in run_dir.rglob("*") if p.is_file() and p.name != "queue.log")
    files = (p for p, first in names if first not in QUEUE_FILES)
    return {str(p.relative_to(run_dir)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(SOME, marks=pytest.mark.slow, id="some"),
        pytest.param(POINTS, marks=pytest.mark.long, id="all"),
    ],
)
def test_a_learner_woken_after_its_successor_attached_changes_no_file_of_the_run(tmp_path: Path, points: list[str]):
    config, run_dir = fault_config(tmp_path, num_rows=NUM_ROWS), tmp_path / "run"
    gates = Gates(tmp_path / "gates")
    environment = {"ASYNC_RL_TEST": str(tmp_path), "ASYNC_RL_FAULTS": str(gates.directory)}

    def last_step() -> int:
        rows = trained_rows(run_dir)
        return rows[-1]["step"] if rows else 0

    with roles(tmp_path / "logs") as start:
        try:
            learner = start("learner-0", "learner", str(config), env=environment)
            address = wait_until("the queue server", lambda: queue_address(run_dir))
            for name in ("generator-0", "generator-1"):
                start(name, "generator", "--connect", address, "--id", name, env=environment)
            for number, point in enumerate(points, start=1):
                wait_until("a checkpoint", (run_dir / "checkpoints" / "latest").exists)
                gates.arm(point)
                wait_until(f"the learner at {point}", lambda: gates.held(point) == learner.process.pid)  # noqa: B023
                if number == 1:
                    refused = start("refused", "learner", str(config), env=environment)
                    assert refused.wait() == 2
                    assert f"process {learner.process.pid} (async-rl learner) uses" in refused.log
                older = learner
                learner = start(f"learner-{number}", "learner", str(config), "--takeover", env=environment)
                # Beyond the next checkpoint. Then the successor is held still: every change is the older one's.
                attached_at = last_step()
                wait_until("steps of the successor", lambda: last_step() >= attached_at + 3)  # noqa: B023
                gates.arm("learner.taken")
                successor = learner.process.pid
                claim = gates.directory / f"learner.taken.{successor}"
                wait_until("the successor's rest", lambda: claim.exists() and state_of(successor) == "T")  # noqa: B023
                before = digests(run_dir)
                os.kill(older.process.pid, signal.SIGCONT)
                assert older.wait() == 1
                assert "LineageError" in older.log
                assert digests(run_dir) == before, point
                claim.unlink()
                os.kill(successor, signal.SIGCONT)
            learner.succeed()
        finally:
            kill_all(f"ASYNC_RL_TEST={tmp_path}")
    print(judge(run_dir, num_rows=NUM_ROWS))
