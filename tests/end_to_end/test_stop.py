"""SIGTERM: the learner saves its last step, and the same command trains what is left, every prompt once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.faults_harness import fault_config, judge, kill_all, trained_rows
from tests.end_to_end.harness import Role, queue_address, roles, start_ranks, wait_until

NUM_ROWS = 24
NUM_STEPS = NUM_ROWS // 2
STOP_AFTER = 5


def a_config(directory: Path, **changes: Any) -> Path:
    """Without a checkpoint before the last step."""
    return fault_config(directory, num_rows=NUM_ROWS, checkpoint={"every": 0}, **changes)


def await_steps(run_dir: Path, *alive: Role) -> None:
    def are_done() -> bool:
        for role in alive:
            assert role.process.poll() is None, role.tail()
        return len(trained_rows(run_dir)) >= STOP_AFTER

    wait_until(f"{STOP_AFTER} steps", are_done)


def saved_step(run_dir: Path) -> int:
    """The step of the latest checkpoint. It is the last trained one, and not the end of the run."""
    step = int((run_dir / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    assert STOP_AFTER <= step < NUM_STEPS
    assert [row["step"] for row in trained_rows(run_dir)] == list(range(1, step + 1))
    return step


def check_curve(run_dir: Path) -> None:
    """The curve was drawn after the last step."""
    assert (run_dir / "curve.png").stat().st_mtime_ns >= (run_dir / "metrics.jsonl").stat().st_mtime_ns


def check_resumed(run_dir: Path, step: int) -> None:
    """The second learner began with ``step``: no step of the first was repeated."""
    lineages = [row["lineage"] for row in trained_rows(run_dir)]
    assert len(set(lineages[:step])) == 1
    assert len(set(lineages[step:])) == 1
    assert lineages[0] != lineages[-1]
    print(f"stopped at step {step}:", judge(run_dir, num_rows=NUM_ROWS))


@pytest.fixture
def start(tmp_path: Path):
    """Gives ``start(name, *arguments)``; no process of the test is left afterwards."""
    environment = {"ASYNC_RL_TEST": str(tmp_path)}
    with roles(tmp_path / "logs") as start_role:
        try:
            yield lambda name, *arguments, env=None: start_role(
                name, *arguments, env={**environment, **(env or {})}, is_program=True
            )
        finally:
            kill_all(f"ASYNC_RL_TEST={tmp_path}")


@pytest.mark.slow
def test_two_ranks_save_at_a_signal_to_one_while_generators_die_and_join_and_one_rank_resumes(
    tmp_path: Path, start: Callable[..., Role]
):
    config, run_dir = a_config(tmp_path), tmp_path / "run"
    ranks = start_ranks(start, config, world_size=2)
    address = wait_until("the queue server", lambda: queue_address(run_dir))
    first, victim = (start(name, "generator", "--connect", address, "--id", name) for name in ("first", "victim"))
    wait_until("two steps", lambda: len(trained_rows(run_dir)) >= 2)
    victim.kill()
    late = start("late", "generator", "--connect", address)
    await_steps(run_dir, *ranks, first, late)
    # As when roles that run by themselves are preempted: the queue server waits for the learner.
    os.kill(json.loads((run_dir / "queue.json").read_text())["pid"], signal.SIGTERM)
    os.kill(ranks[1].process.pid, signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [143, 143]
    step = saved_step(run_dir)
    assert [rank.log.count(f" step {step}/{NUM_ROWS} | reward ") for rank in ranks] == [1, 0]
    assert "SIGTERM at another rank: saving" in ranks[0].log
    assert f"saved at step {step}" in ranks[0].log
    assert not any("Traceback" in rank.log for rank in ranks)
    check_curve(run_dir)
    # The generators hold groups that nobody asks for any more.
    start("again", "learner", str(config)).succeed()
    for generator in (first, late):
        generator.succeed()
    check_resumed(run_dir, step)
