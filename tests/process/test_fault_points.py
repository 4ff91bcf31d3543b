"""The fault points: once in the code, free without the variable, and a stop for one process when armed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.fault_points import AGENT_FAULT_POINTS, FAULT_POINTS, OFFLINE_FAULT_POINTS, PACKAGE, found_in

ROOT = Path(__file__).resolve().parents[2]
PASS_TWICE = (
    "from async_rl.process.fault_points import fault_point; "
    "[fault_point('learner.taken') for _ in range(2)]; print('passed')"
)


def run_past(gates: Path) -> subprocess.Popen[str]:
    """A process that passes the place ``learner.taken`` twice."""
    return subprocess.Popen(
        [sys.executable, "-c", PASS_TWICE], env={**os.environ, "ASYNC_RL_FAULTS": str(gates)}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip


def test_every_fault_point_is_in_the_code_once():
    # A version arrives by a collective, from the learner or from a generator: the receiver of each has the point once.
    several = {name: count for name, count in Counter(found_in(PACKAGE)).items() if count > 1}
    assert several == {"generator.receiving": 3}
    assert (len(FAULT_POINTS), len(AGENT_FAULT_POINTS), len(OFFLINE_FAULT_POINTS)) == (13, 12, 3)


def test_an_armed_place_stops_the_first_process_once_and_names_it(tmp_path: Path):
    (tmp_path / "learner.taken").touch()
    process = run_past(tmp_path)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert [path.name for path in tmp_path.iterdir()] == [f"learner.taken.{process.pid}"]
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=30)[0] == "passed\n"
