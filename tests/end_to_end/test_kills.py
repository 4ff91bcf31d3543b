"""A learner killed at the worst moments, and the same command again, in real processes over the fake backend."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.end_to_end.harness import (
    Role,
    check_ledger,
    metrics,
    processes_of,
    queue_address,
    roles,
    steps,
    wait_until,
    write_config,
)
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.forked_roles import command_line

_T = TypeVar("_T")
NUM_STEPS = 2
FAKE = {"mean_tokens": 6.0, "step_time_s": 0.1, "vocab_size": 20}
"""Eight answers on four slots take 1.2 s: long enough to be killed in."""


def slow_config(directory: Path) -> Path:
    raw: dict[str, Any] = tiny_config(
        directory,
        write_tiny_task(directory),
        learner={"steps": NUM_STEPS},
        generator={"backend": "fake", "batch_size": 4},
        experimental={"fake": FAKE},
        checkpoint={"every": 0},
        eval={"every": 0},
    )
    raw["experimental"]["linger_s"] = 30.0
    return write_config(directory / "config.toml", raw)


def evals(run_dir: Path) -> list[int]:
    return [row["step"] for row in metrics(run_dir) if "eval/held_out/accuracy" in row]


def has_last_checkpoint(run_dir: Path) -> bool:
    latest = run_dir / "checkpoints" / "latest"
    return latest.exists() and latest.read_text().strip() == f"step-{NUM_STEPS:06d}"


def while_alive(role: Role, probe: Callable[[], _T]) -> Callable[[], _T]:
    """``probe``, which fails with the role's last words once it is dead."""

    def checked() -> _T:
        assert role.process.poll() is None, role.tail()
        return probe()

    return checked


@pytest.mark.slow
def test_a_learner_killed_before_its_first_checkpoint_and_in_its_last_evaluation(tmp_path: Path):
    config, run_dir = slow_config(tmp_path), tmp_path / "run"
    with roles(tmp_path / "logs") as start:

        def kill(learner: Role, what: str, moment: Callable[[], object]) -> None:
            wait_until(what, while_alive(learner, moment), deadline_s=150)
            learner.kill(signal.SIGKILL)
            learner.wait()

        first = start("first", "learner", str(config))  # it starts the queue server, too
        address = wait_until("the queue's address", while_alive(first, lambda: queue_address(run_dir)))
        generator = start("generator", "generator", "--connect", address)
        kill(first, "the first step", lambda: steps(run_dir))
        assert evals(run_dir) == [0]
        kill(start("second", "learner", str(config)), "the last checkpoint", lambda: has_last_checkpoint(run_dir))
        assert (steps(run_dir), evals(run_dir)) == ([1, 2], [0])
        # As if it had been killed once more, after its export.
        (run_dir / "export").mkdir()
        (run_dir / "export" / "half.safetensors").touch()
        start("third", "learner", str(config)).succeed()
        generator.succeed()
    assert (steps(run_dir), evals(run_dir)) == ([1, 2], [0, 2])
    assert sorted(p.name for p in (run_dir / "export").glob("*.safetensors")) == ["model.safetensors"]
    ledger = check_ledger(run_dir)
    assert ledger["groups"]["trained"] == NUM_STEPS * 4
    assert ledger["eval"]["groups"]["dropped"]["unused_at_end"] == 0
    finished = json.loads((run_dir / "finished.json").read_text())
    assert (finished["step"], finished["version"]) == (NUM_STEPS, NUM_STEPS)


@pytest.mark.long
def test_launch_restarts_a_learner_that_dies_in_its_last_evaluation_and_ends_well(tmp_path: Path):
    config, run_dir = slow_config(tmp_path), tmp_path / "run"
    marker = f"ASYNC_RL_TEST={tmp_path}"

    def learner_of_launch() -> int:
        found = [p for p in processes_of(marker) if "learner" in command_line(p)]
        (pid,) = found
        return pid

    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config), env={"ASYNC_RL_TEST": str(tmp_path)})
        wait_until("the last checkpoint", lambda: has_last_checkpoint(run_dir), deadline_s=150)
        os.kill(learner_of_launch(), signal.SIGKILL)
        launch.succeed()
        assert "restarting the learner from step-000002" in launch.log
        assert not processes_of(marker)
    assert (steps(run_dir), evals(run_dir)) == ([1, 2], [0, 2])
    check_ledger(run_dir)
