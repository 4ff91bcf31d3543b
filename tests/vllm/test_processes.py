"""No process of an engine outlives its generator, however that ends; and the quickstart on vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.harness import ROOT, check_ledger, metrics, state_of, wait_until

pytestmark = pytest.mark.vllm


def descendants(pid: int) -> set[int]:
    """Of ``pid``, by the kernel's parent numbers; vLLM's processes write their titles over their environment."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended between the listing and the look
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", ["generator", "engine"])
def test_a_killed_generator_leaves_no_engine_behind_and_a_killed_engine_ends_its_generator(tmp_path, killed: str):
    children: set[int] = set()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine_program"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        # vLLM writes there, too. The output ends without such a line only if the process does.
        sampled = (int(line.split()[1]) for line in process.stdout if line.startswith("tokens "))
        assert any(number > 100 for number in sampled), (tmp_path / "log").read_text()
        children = descendants(process.pid)
        assert len(children) >= 2, "expected vLLM's engine and worker processes"
        if killed == "engine":
            (engine,) = [pid for pid in children if title_of(pid).startswith(b"VLLM::EngineCore")]
            os.kill(engine, signal.SIGKILL)
            assert process.wait(60) == 1
        process.kill()
        process.wait(10)
        wait_until("the engine's processes to end", lambda: not living(children), deadline_s=30)
    finally:
        process.kill()
        process.wait(10)
        for pid in living(children):
            os.kill(pid, signal.SIGKILL)
        process.stdout.close()


def title_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if state_of(pid) not in (None, "Z")}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_quickstart_learns_with_vllm_on_the_cpu(tmp_path):
    started_s = time.monotonic()
    run_dir = tmp_path / "run"
    words = ("quickstart", "--set", f"run.dir={run_dir}", "--set", "generator.backend=vllm")
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = metrics(run_dir)
    evals = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
    assert evals[-1] >= 0.65, evals
    check_ledger(run_dir)
    print(f"{time.monotonic() - started_s:.0f} s, accuracy {evals[0]:.3f} -> {evals[-1]:.3f}")
