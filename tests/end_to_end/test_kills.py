"""A learner killed at the worst moments, and the same command again, in real processes over the fake backend."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.harness import (
    Role,
    check_ledger,
    metrics,
    queue_address,
    roles,
    steps,
    wait_until,
    write_config,
)
from tests.end_to_end.tiny import tiny_config, write_tiny_task

NUM_STEPS = 2
FAKE = {"mean_tokens": 6.0, "step_time_s": 0.1, "vocab_size": 20}
"""Eight answers on four slots take 1.2 s: long enough to be killed in."""


def evals(run_dir: Path) -> list[int]:
    return [row["step"] for row in metrics(run_dir) if "eval/held_out/accuracy" in row]


def has_last_checkpoint(run_dir: Path) -> bool:
    latest = run_dir / "checkpoints" / "latest"
    return latest.exists() and latest.read_text().strip() == f"step-{NUM_STEPS:06d}"


@pytest.mark.slow
def test_a_learner_killed_before_its_first_checkpoint_and_in_its_last_evaluation(tmp_path: Path):
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        learner={"steps": NUM_STEPS},
        generator={"backend": "fake", "batch_size": 4},
        experimental={"fake": FAKE},
        checkpoint={"every": 0},
        eval={"every": 0},
    )
    config, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:

        def kill(learner: Role, what: str, moment: Callable[[], object]) -> None:
            wait_until(what, lambda: learner.process.poll() is not None or moment(), deadline_s=150)
            assert learner.process.poll() is None, learner.tail()
            learner.kill(signal.SIGKILL)
            learner.wait()

        first = start("first", "learner", str(config))  # it starts the queue server, too
        address = wait_until("the queue's address", lambda: queue_address(run_dir))
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
