"""Starts real rank processes with torchrun's environment; each runs one function of ``rank_scenarios.py``."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.forked import Forked, preload
from tests.learner.rank_scenarios import run_scenario
from tests.ports import free_port

preload("tests.learner.rank_scenarios", "async_rl.learner.engine.fsdp_engine", "transformers.models.qwen2")


def start_ranks(scenario: str, directory: Path, *, world_size: int = 2) -> list[Forked]:
    """One process a rank."""
    shared = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        Forked(run_scenario, scenario, directory, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]


def finish_ranks(processes: list[Forked], timeout_s: float = 300.0) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left behind."""
    try:
        return [(process.wait(timeout_s), "".join(process.communicate())) for process in processes]
    finally:
        for process in processes:
            process.kill()


def run_ranks(scenario: str, directory: Path, *, world_size: int = 2, timeout_s: float = 300.0) -> None:
    """Run a scenario that must succeed on every rank."""
    results = finish_ranks(start_ranks(scenario, directory, world_size=world_size), timeout_s)
    ends = "\n\n".join(f"rank {rank} ended with {code}: {output}" for rank, (code, output) in enumerate(results))
    assert all(code == 0 for code, _ in results), ends


def kill_at(point: str, scenario: str, directory: Path, *, world_size: int) -> None:
    """Run a scenario that reads its fault point from ``point``, at which one rank is killed; the others fail."""
    (directory / "point").write_text(point)
    ended = finish_ranks(start_ranks(scenario, directory, world_size=world_size))
    killed = int(point.rpartition("-rank-")[2]) if "-rank-" in point else 0
    assert ended[killed][0] == -signal.SIGKILL, "\n\n".join(output for _, output in ended)
    assert all(code for code, _ in ended)
