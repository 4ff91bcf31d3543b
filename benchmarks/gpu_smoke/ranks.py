"""Two ranks of the learner's engine: a step under each layout, and a rank that dies.

``python -m benchmarks.gpu_smoke.ranks LAYOUT DIRECTORY`` is one rank.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from benchmarks.gpu_smoke import engine
from benchmarks.gpu_smoke.case import Machine, NotRunError

LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {},
    "replicas": {"replicas": 2},
    "tensor": {"tensor": 2},
    "sequence": {"sequence": 2},
    "pipeline": {"pipeline": 2},
    "experts": {"experts": 2},
}
"""Sections ``parallel`` of a config, for two ranks."""
DYING = "dying"
TIMEOUT_S = 10.0


def check_layout(name: str, machine: Machine) -> str:
    """Compare a step of two ranks with float32 in one process on the CPU."""
    sequences, exact = _prepare(machine, has_experts=name == "experts")
    processes = _start(name, machine)
    codes = [process.wait() for process in processes]
    assert codes == [0, 0], f"expected both ranks to succeed, got exit codes {codes}; see the log"
    error = float((exact - engine.first_moments(machine.directory / "found")).norm() / exact.norm())
    tolerance = engine.TOLERANCE[machine.dtype]
    assert error < tolerance, f"expected an error of the gradient below {tolerance}, got {error:.2g}"
    return f"{len(sequences)} sequences against float32 in one process: gradient within {error:.1g}"


def check_dead_rank(machine: Machine) -> str:
    """Kill one of two ranks in the middle of the training. The other one must end, and not hang."""
    _prepare(machine, has_experts=False)
    leader, other = _start(DYING, machine)
    try:
        while not (machine.directory / "stepped").exists():
            assert leader.poll() is None, f"rank 0 ended with exit code {leader.returncode} before its first step"
            time.sleep(0.05)
        other.kill()
        start = time.monotonic()
        code = leader.wait(3 * TIMEOUT_S)
    finally:
        leader.kill()
        other.kill()
    assert code not in (0, -9), f"expected rank 0 to fail without its peer, got exit code {code}"
    return f"rank 0 ended {time.monotonic() - start:.1f} s after rank 1 was killed (limit {TIMEOUT_S:.0f} s)"


def _prepare(machine: Machine, *, has_experts: bool) -> tuple[list[Any], torch.Tensor]:
    """Write the model and the sequences. Return these, and the exact gradient."""
    if machine.has_cuda and torch.cuda.device_count() < 2:
        raise NotRunError("needs CUDA devices: 2, because NCCL's ranks can't share one")
    model = engine.write_model(machine.directory / "model", engine.SMALL, engine.VOCAB, has_experts=has_experts)
    alone = engine.on_cpu(engine.config_of(machine, model, "float32", {}))
    sequences = engine.scored(alone, engine.random_sequences(8, 96, engine.VOCAB), has_reference=False)
    (machine.directory / "sequences").write_bytes(pickle.dumps(sequences))
    return sequences, engine.gradient(alone, sequences, machine.directory / "exact")


def _start(name: str, machine: Machine) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.gpu_smoke.ranks", name, str(machine.directory)]
    return [subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]


def main(name: str, directory: Path) -> None:
    machine = Machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), directory)
    sections = {"experimental": {"distributed_timeout_s": TIMEOUT_S}, "parallel": LAYOUTS.get(name, {})}
    config = engine.config_of(machine, directory / "model", machine.dtype, sections)
    ranks = init_ranks(config)
    learner = FsdpEngine(config, ranks)
    if not ranks.is_leader:
        learner.follow()
        return
    sequences = pickle.loads((directory / "sequences").read_bytes())  # written by this program
    stats = learner.update(sequences, version=0)
    assert stats.stepped, f"expected a step, got none: {stats.reason}"
    if name == DYING:
        (directory / "stepped").touch()
        while True:  # until rank 1 is missed
            learner.update(sequences, version=0)
    (directory / "found").mkdir()
    learner.save(directory / "found", {})
    learner.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
