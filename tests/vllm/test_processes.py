"""No process of an engine outlives its generator, however that ends; and the quickstart on vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.end_to_end.harness import ROOT, check_ledger, metrics, processes_of, wait_until

pytestmark = pytest.mark.vllm


@pytest.mark.timeout(900)
def test_a_killed_generator_leaves_no_engine_behind(tmp_path):
    marker = f"ASYNC_RL_TEST_ENGINE={tmp_path.name}-{os.getpid()}"
    name, _, value = marker.partition("=")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine_program"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", name: value},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            # vLLM writes there, too. The output ends without such a line only if the process does.
            sampled = (int(line.split()[1]) for line in process.stdout if line.startswith("tokens "))
            assert any(number > 100 for number in sampled), (tmp_path / "log").read_text()
            engine = set(processes_of(marker)) - {process.pid}
            assert len(engine) >= 2, "expected vLLM's engine and worker processes"
            process.kill()
            process.wait(10)
            wait_until("the engine's processes to end", lambda: not processes_of(marker), deadline_s=30)
        finally:
            for pid in processes_of(marker):
                os.kill(pid, signal.SIGKILL)
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.timeout(1800)
def test_the_quickstart_learns_with_vllm_on_the_cpu(tmp_path):
    started_s = time.monotonic()
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "examples/quickstart.py", "--run-dir", str(run_dir), "--set", "generator.backend=vllm"],
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
