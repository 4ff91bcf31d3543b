"""``async-rl bundle``: what somebody elsewhere needs to debug a run, without data, rollouts and keys.

It takes whatever is there: of a run that goes on, was killed, has damaged files, or has never started.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from async_rl.config.loading import load_config, load_run_config
from async_rl.errors import RunError, UserError
from async_rl.extensions.ops.rank_watch import long_waits, read_states
from async_rl.launch.checks.doctor import run_table
from async_rl.launch.checks.start import Start
from async_rl.launch.checks.table import checks_of
from async_rl.output import Report, size_text
from async_rl.process.child import module_command, package_environment
from async_rl.process.package_versions import package_versions
from async_rl.redaction import redacted, without_names
from async_rl.run.directory import RunDir
from async_rl.run.lock import holder_of

_HEAD_BYTES, _TAIL_BYTES = 256 << 10, 1 << 20
_FILES = (
    "config.toml", "run_id", "config_changes.jsonl", "origin.json", "queue.json", "ledger.json", "metrics.jsonl",
    "notes.log", "finished.json", "mirror.json", "run.lock", "logs/*", "follow/*.log",
)  # fmt: skip
"""The files of a run directory that have neither data nor rollouts."""
_CHECKS = frozenset({
    "versions", "cores", "ranks", "engine keys", "run.dir", "queue.address", "weights.port", "interface", "devices",
    "all devices", "engines", "model", "parallel", "compiler", "disk", "memory", "device memory", "two ranks",
})  # fmt: skip
"""The doctor's checks that read no rows, run none of the user's code, and call no service."""
_VARIABLES = ("NCCL_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "GLOO_", "OMP_", "SLURM_", "ASYNC_RL_", "LD_", "PYTHON")
_PROGRAMS = ("uname -a", "nvidia-smi", "nvidia-smi topo -m", "ibstat", "free -h", "df -h")


def collected(run: Path, report: Report) -> dict[str, tuple[str, str]]:
    """Return the text of each file of the archive by its name, and a note on what is left out of it.

    ``run`` is a run directory, or the config of a run that has none. Raises RunError if it does not exist.
    """
    if not run.exists():
        raise RunError(f"expected a run directory, or a config, got {run}, which does not exist; correct the path")
    files = {"config.toml": run} if run.is_file() else {}
    files |= {str(path.relative_to(run)): path for name in _FILES for path in sorted(run.glob(name))}
    texts = {name: _read(path) for name, path in files.items()}
    packages = {package.name: package.version for package in distributions()} | package_versions()
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    report("asking the queue server")
    made = {
        "waits.txt": "\n".join(long_waits(read_states(RunDir(run))).values()),
        "status.txt": _output(module_command("async_rl", "status", str(run), "--json")),
        "doctor.txt": _doctor(run, report),
        "versions.txt": _lines(packages),
        "environment.txt": _lines(variables),
        "machine.txt": "\n".join(f"$ {program}\n{_output(program.split())}" for program in _PROGRAMS),
        "files.txt": _output(("find", str(run), "-printf", "%s %t %P\n")),
    }
    texts |= {name: (text, "") for name, text in made.items()}
    return {name: (without_names(redacted(text)), note) for name, (text, note) in texts.items()}


def _lines(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in sorted(values.items()))


def _read(path: Path) -> tuple[str, str]:
    """Return the text of a file, of a long one its head and tail, and a note on what is left out."""
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
        return "", "left out: a link, or no regular file"
    try:
        with path.open("rb") as file:
            size, data = os.fstat(file.fileno()).st_size, file.read(_HEAD_BYTES + _TAIL_BYTES)
            if size <= len(data):
                return data.decode(errors="replace"), ""
            file.seek(-_TAIL_BYTES, os.SEEK_END)
            head, tail = data[: data.rfind(b"\n", 0, _HEAD_BYTES) + 1], file.read().partition(b"\n")[2]
    except OSError as error:
        return "", f"left out: {error.strerror}"
    note = f"head and tail of {size_text(size)}"
    return f"{head.decode(errors='replace')}[{note}]\n{tail.decode(errors='replace')}", note


def _doctor(run: Path, report: Report) -> str:
    """Return what the doctor's checks find, or why they were not made."""
    holder = None if run.is_file() else holder_of(RunDir(run).lock)
    if holder is not None and holder.is_local and holder.may_live:
        return f"not checked: {holder} uses the devices"
    try:
        config = load_config(run) if run.is_file() else load_run_config(RunDir(run).config)
    except UserError as error:
        return f"not checked: {error}"
    start = Start(config, "offline" if config.is_offline_only else "launch", insecure=True, may_run=True)
    checks = [check for check in checks_of(start, with_doctors=True) if check.name in _CHECKS]
    return "\n".join(f"{f.state:4} {f.message}" for f in run_table(start, checks, deadline_s=60.0, report=report))


def _output(command: Sequence[str]) -> str:
    """Return what a program prints, or why it can't be run."""
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": package_environment()}
    try:
        return subprocess.run(command, timeout=30, check=False, **settings).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
