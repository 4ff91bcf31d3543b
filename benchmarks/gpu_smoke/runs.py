"""Whole runs with ``async-rl launch``: the quickstart's task on this machine's devices."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.run.records.token_columns import read_token_columns
from benchmarks.gpu_smoke.case import Machine, NotRunError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/quickstart.toml"
NUM_STEPS = 10
ACCURACY = 0.9
"""The quickstart reaches 0.95 and more after 80 steps, from 0.3."""
MISMATCH = {"cuda": 2e-3, "cpu": 1e-3}
"""Largest mean |log pi/mu| of fresh tokens: the engine's and the learner's forward passes must agree. In bfloat16 on a
CPU it was at most 3e-5."""


def launch(*options: str) -> subprocess.Popen[bytes]:
    """Start a run of the quickstart's task. Its output is that of the case."""
    settings = [word for option in options for word in ("--set", option)]
    return subprocess.Popen([sys.executable, "-m", "async_rl", "launch", CONFIG, *settings], cwd=ROOT)


def warm_start(machine: Machine) -> str:
    """Make the task and the model that runs begin with. Both are kept below ``runs/`` for the next time."""
    code = "from async_rl.extensions.quickstart import prepare, tasks; prepare.make_task(tasks.SUMS, 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return "the quickstart's task and model, kept for the next time"


def options_for(machine: Machine, **changes: Any) -> list[str]:
    """Settings of a short run. Both sides use the first device if there is only one."""
    settings = {
        "run.dir": machine.directory / "run",
        "learner.steps": NUM_STEPS,
        "checkpoint.every": 4,
        "eval.every": 0,
        "log.rollouts_every": 1,
        "log.rollouts_groups": "all",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of training steps in ``metrics.jsonl``, empty if there are none yet."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "version" in row]


def finish(process: subprocess.Popen[bytes]) -> None:
    assert process.wait() == 0, f"expected the run to succeed, got exit code {process.returncode}; see the log"


def mismatch_of(run_dir: Path) -> float:
    """Return the mean |log pi/mu| of fresh tokens in the step where it is largest. Answers that cross an update do not
    count: their keys and values of the version before were kept.
    """
    means: list[float] = []
    for path in sorted(run_dir.glob("rollouts/*.tokens.parquet")):
        table = read_token_columns(path)
        ends = np.cumsum(table.sizes)
        behavior, logprobs, versions = (table.numbers[n] for n in ("behavior_logprobs", "logprobs", "versions"))
        fresh = np.zeros(len(versions), bool)
        for begin, end, now in zip(ends - table.sizes, ends, table.places["learner_version"], strict=True):
            own = versions[begin:end]
            fresh[begin:end] = (own == now) & np.isin(own, (-1, now)).all()
        if (counted := fresh & ~np.isnan(logprobs)).any():
            means.append(float(np.abs(logprobs - behavior)[counted].mean()))
    assert means, "expected tokens of the learner's own version in some step's rollouts, got none"
    return max(means)


def judge(machine: Machine, num_steps: int = NUM_STEPS) -> str:
    """Check that each step was made once, and that engine and learner agree on fresh tokens."""
    rows = rows_of(machine.directory / "run")
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1)), "expected each step once, in order"
    mismatch = mismatch_of(machine.directory / "run")
    bound = MISMATCH[machine.device.type]
    assert mismatch < bound, f"expected a mean abs. log ratio of fresh tokens below {bound}, got {mismatch:.4f}"
    return f"{num_steps} steps, mean abs. log ratio of fresh tokens at most {mismatch:.1e}"


def judge_broadcasts(machine: Machine) -> str:
    """Check that most versions were broadcast. A generator pulls until it has joined the collective."""
    rows = rows_of(machine.directory / "run")
    share = rows[-1]["weights/pulled_bytes"] / sum(row["weights/bytes"] for row in rows if "weights/bytes" in row)
    assert share < 0.5, f"expected most versions to be broadcast, but {share:.0%} of the bytes were pulled"
    return f"{1 - share:.0%} of the bytes broadcast"


def check_tcp(machine: Machine) -> str:
    finish(launch(*options_for(machine, weights__transport="tcp")))
    return judge(machine)


def check_gloo(machine: Machine) -> str:
    """Run with gloo, learner and generator on the first device if there is only one."""
    return _broadcast_run(machine, weights__transport="gloo")


def check_nccl(machine: Machine) -> str:
    """Run with NCCL, learner and generator on two devices."""
    return _broadcast_run(machine, weights__transport="nccl", learner__devices=[0], generator__devices=[1])


def _broadcast_run(machine: Machine, **changes: Any) -> str:
    """Run 20 steps, and kill the generator after a few versions with SIGKILL. Another one is started, and joins."""
    num_steps = 20
    process = launch(*options_for(machine, learner__steps=num_steps, **changes))
    os.kill(_after_steps(machine, process, 5), signal.SIGKILL)
    finish(process)
    return f"{judge(machine, num_steps)}; generator killed at step 5; {judge_broadcasts(machine)}"


def check_killed(machine: Machine) -> str:
    """Kill ``launch`` after a checkpoint, with SIGKILL. The same command must then finish the run."""
    run_dir = machine.directory / "run"
    process = launch(*options_for(machine))
    while not (run_dir / "checkpoints" / "latest").exists():
        assert process.poll() is None, f"the run ended with {process.returncode} before its first checkpoint"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_before = len(rows_of(run_dir))
    finish(launch(*options_for(machine)))
    rows = {row["step"]: row for row in rows_of(run_dir)}
    assert sorted(rows) == list(range(1, NUM_STEPS + 1)), "expected every step"
    return f"killed after {num_before} steps, then finished all {NUM_STEPS}"


def check_quickstart(machine: Machine) -> str:
    """Run the quickstart, and read the accuracy at its end."""
    start = time.monotonic()
    finish(launch(f"run.dir={machine.directory / 'run'}"))
    took = time.monotonic() - start
    lines = (machine.directory / "run" / "metrics.jsonl").read_text().splitlines()
    found = [row["eval/held_out/accuracy"] for row in map(json.loads, lines) if "eval/held_out/accuracy" in row]
    assert found[-1] > ACCURACY, f"expected an accuracy above {ACCURACY}, got {found[-1]:.3f}"
    return f"accuracy {found[0]:.3f} to {found[-1]:.3f} in {took:.0f} s"


def check_nccl_frozen(machine: Machine) -> str:
    """Run with NCCL to two generators, and stop one of them for good after a few versions: the other must go on."""
    num_steps = 20
    changes = {"learner__devices": [0], "generator__devices": [1, 2], "generator__count": 2, "weights__deadline_s": 20}
    process = launch(*options_for(machine, learner__steps=num_steps, weights__transport="nccl", **changes))
    frozen = _after_steps(machine, process, 5)
    os.kill(frozen, signal.SIGSTOP)
    try:
        finish(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGKILL)
    return f"{judge(machine, num_steps)}; one of two generators stopped at step 5"


def check_vllm(machine: Machine) -> str:
    """Run with vLLM's engine, compiled and with CUDA graphs, on the learner's device."""
    changes = {"generator__backend": "vllm", "generator__memory_fraction": 0.3, "generator__double_buffer": False}
    finish(launch(*options_for(machine, **changes)))
    return judge(machine)


def check_vllm_in_learner(machine: Machine) -> str:
    """Run a learner that samples with vLLM, whose memory must be free while the learner trains."""
    fraction = 0.6
    changes = {"learner__generate": True, "learner__generate_backend": "vllm", "generator__count": 0}
    process = launch(*options_for(machine, **changes, generator__memory_fraction=fraction))
    free: list[float] = []
    # From the first step on, when vLLM has loaded a version, to the last: its end would free its memory, too.
    while process.poll() is None and (num_rows := len(rows_of(machine.directory / "run"))) < NUM_STEPS:
        if num_rows:
            now, total = torch.cuda.mem_get_info()
            free.append(now / total)
        time.sleep(0.01)
    finish(process)
    lent = max(free) - min(free)
    assert lent > fraction / 2, f"expected vLLM to give {fraction:.0%} of the memory up at each step, got {lent:.0%}"
    return f"{judge(machine)}; vLLM gave {lent:.0%} of the device's memory up"


def check_vllm_nccl(machine: Machine) -> str:
    """Run with vLLM on a device of its own, whose worker receives 20 versions by NCCL while it decodes."""
    return _vllm_apart(machine, devices=[1])


def check_vllm_tensor_parallel(machine: Machine) -> str:
    """Run with vLLM over two devices, which gets 20 versions by NCCL through the host."""
    return _vllm_apart(machine, devices=[1, 2])


def _vllm_apart(machine: Machine, *, devices: list[int]) -> str:
    num_steps = 20
    changes = {
        "generator__backend": "vllm",
        "generator__tensor_parallel_size": len(devices),
        "generator__devices": devices,
        "learner__devices": [0],
        "weights__transport": "nccl",
    }
    finish(launch(*options_for(machine, learner__steps=num_steps, **changes)))
    pauses = [row["time/pause_s"] for row in rows_of(machine.directory / "run") if row.get("time/pause_s")]
    return f"{judge(machine, num_steps)}; {judge_broadcasts(machine)}; longest pause {1000 * max(pauses):.0f} ms"


def check_torchrun(machine: Machine) -> str:
    """Run two learner ranks under torchrun, and a generator that is started by hand."""
    if machine.has_cuda and torch.cuda.device_count() < 2:
        raise NotRunError("needs CUDA devices: 2, because NCCL's ranks can't share one")
    settings = [word for option in options_for(machine) for word in ("--set", option)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "async_rl"]
    learner = subprocess.Popen([*torchrun, "learner", CONFIG, *settings], cwd=ROOT)
    queue = machine.directory / "run" / "queue.json"
    while not queue.exists():
        assert learner.poll() is None, f"the learner ended with {learner.returncode} before the queue server was up"
        time.sleep(0.05)
    address = json.loads(queue.read_text())["address"]
    command = [sys.executable, "-m", "async_rl", "generator", "--connect", address]
    generator = subprocess.Popen(command, cwd=ROOT)
    finish(learner)
    finish(generator)
    return judge(machine)


def check_two_ranks(machine: Machine) -> str:
    """Run with two learner ranks, each on a device of its own."""
    if machine.has_cuda and torch.cuda.device_count() < 2:
        raise NotRunError("needs CUDA devices: 2, because NCCL's ranks can't share one")
    finish(launch(*options_for(machine, learner__nproc=2)))
    return judge(machine)


def _after_steps(machine: Machine, process: subprocess.Popen[bytes], num_steps: int) -> int:
    """Wait until the run has made so many steps. Return the process id of a generator."""
    while len(rows_of(machine.directory / "run")) < num_steps:
        assert process.poll() is None, f"the run ended with {process.returncode} before step {num_steps}"
        time.sleep(0.05)
    return _generator_of(process.pid)


def _generator_of(launch_pid: int) -> int:
    import psutil

    for child in psutil.Process(launch_pid).children(recursive=True):
        if "generator" in child.cmdline():
            return child.pid
    raise AssertionError("expected a generator process, got none")
