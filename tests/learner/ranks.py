"""Starts real rank processes with torchrun's environment; each runs one function of ``rank_scenarios.py``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]


def start_ranks(scenario: str, directory: Path, *, world_size: int = 2) -> list[subprocess.Popen[str]]:
    """One process a rank; output is piped, stderr into stdout."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.learner.rank_scenarios", scenario, str(directory)],
            cwd=_REPOSITORY,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def finish_ranks(processes: list[subprocess.Popen[str]], timeout_s: float = 90.0) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left behind."""
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def run_ranks(scenario: str, directory: Path, *, world_size: int = 2) -> None:
    """Run a scenario that must succeed on every rank."""
    results = finish_ranks(start_ranks(scenario, directory, world_size=world_size))
    assert [code for code, _ in results] == [0] * world_size, "\n\n".join(output for _, output in results)
