"""Runs every GPU path of async-rl on this machine, each in a process of its own, and prints a line for each.

It takes about ten minutes, uses no network and installs nothing. What the machine can't run is listed as not run. The
exit code is 1 if a case failed. The figures go to a JSON file, for ``benchmarks.baselines``. On a machine without a GPU
the cases that don't need one run on the CPU, in small.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_rl.output import Progress, can_redraw
from async_rl.process.child import kill_group
from async_rl.process.family import kill_marked
from async_rl.process.package_versions import package_versions

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("vllm", "nccl4py")
_LOG_LINES = 15
_MARK = "ASYNC_RL_SMOKE_CASE"
"""Environment variable that all processes of a case have."""


def missing_packages() -> list[str]:
    """Return the dependencies of async-rl that this Python has not, whatever their versions."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [name for name in (re.split(r"[><=!~; \[]", line)[0] for line in needed) if _version(name) is None]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine() -> list[str]:
    """Return lines about versions and devices."""
    import torch

    found = [f"{name} {_version(name) or 'not installed'}" for name in ("torch", "transformers", *OPTIONAL)]
    lines = [f"CPython {platform.python_version()}, {', '.join(found)}, {os.cpu_count()} cores"]
    if not torch.cuda.is_available():
        return [*lines, "no CUDA device: cases that need one are not run, the others run on the CPU"]
    for index in range(torch.cuda.device_count()):
        size = torch.cuda.get_device_properties(index).total_memory
        lines.append(
            f"cuda:{index} {torch.cuda.get_device_name(index)}, {size / 1e9:.0f} GB, CUDA {torch.version.cuda}"
        )
    return lines


def run_here(name: str, directory: Path) -> None:
    """Run one case in this process, and write its result to ``directory / "result.json"``."""
    import torch

    from async_rl.learner.phases import highest_memory_bytes
    from benchmarks.gpu_smoke.case import Figure, Machine, NotRunError, Outcome, Result
    from benchmarks.gpu_smoke.cases import CASES

    case = CASES[name]
    print(f"torch computes with {torch.get_num_threads()} thread(s)", flush=True)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    machine = Machine(torch.device("cuda", 0) if num_devices else torch.device("cpu"), directory)
    outcome: Outcome = "passed"
    start = time.monotonic()
    try:
        detail = case.check(machine)
    except NotRunError as reason:
        outcome, detail = "not run", str(reason)
    except Exception as error:  # whatever a case raises is its result, and its traceback is in the log
        traceback.print_exc()
        outcome, detail = "FAILED", f"{type(error).__name__}: {error}"
    used = highest_memory_bytes(machine.device) if num_devices else 0
    if used:
        machine.figures["peak memory"] = Figure(used, "bytes")
    result = Result(name, outcome, detail, time.monotonic() - start, used, machine.figures)
    (directory / "result.json").write_text(json.dumps(asdict(result)))


def environment_of_cases(inherited: Mapping[str, str], *, has_cuda: bool) -> dict[str, str]:
    """Return the environment variables of the cases' processes.

    Without a GPU each process computes with one thread, unless the user chose a number. By default each has as many as
    there are cores, and they wait actively for each other: beside another busy process a case took five times as long.
    """
    return ({} if has_cuda else {"OMP_NUM_THREADS": "1"}) | dict(inherited)


def why_not_run(name: str) -> str:
    """Return which device or package this machine lacks for the case; empty if none."""
    import torch

    from benchmarks.gpu_smoke.cases import CASES

    case = CASES[name]
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices < case.num_devices:
        return f"needs CUDA devices: {case.num_devices}, and there are {num_devices}"
    if case.package and importlib.util.find_spec(case.package) is None:
        return f"needs the package {case.package}, which is not installed"
    return ""


def run_apart(name: str, deadline_s: float, directory: Path) -> dict[str, object]:
    """Run one case in a process of its own and return its result.

    Its processes are killed at the deadline, when the user interrupts it, and if they are left when it has ended: they
    would take the device from the next case. torchrun's ranks have sessions of their own, so a mark tells whose they
    are. No process is started for what the machine can't run: the start alone
    takes seconds.
    """
    import torch

    if reason := why_not_run(name):
        return {"name": name, "outcome": "not run", "detail": reason, "took_s": 0.0, "device_bytes": 0}
    directory.mkdir()
    mark = uuid.uuid4().hex
    environment = environment_of_cases(os.environ, has_cuda=torch.cuda.is_available()) | {_MARK: mark}
    command = [sys.executable, "-m", "benchmarks.gpu_smoke", "--here", name, "--directory", str(directory)]
    start = time.monotonic()
    with (directory / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process.pid, signal.SIGKILL)
            process.wait()
            kill_marked(_MARK, mark)
    took_s = time.monotonic() - start
    path = directory / "result.json"
    result: dict[str, object] = {"name": name, "detail": "", "device_bytes": 0}
    if path.exists():
        result = json.loads(path.read_text())
    if code == 0 and path.exists():
        return result | {"took_s": took_s}
    # What crashes or hangs while it ends has a result by then, and is wrong all the same.
    cause = f"did not end within {deadline_s:.0f} s" if code is None else f"ended with exit code {code}"
    found = f"{result['detail']}; but it " if result["detail"] else ""
    return result | {"outcome": "FAILED", "detail": found + cause, "took_s": took_s}


def line_of(result: dict[str, object]) -> str:
    """Return the row of the table, in Markdown."""
    used = result["device_bytes"]
    assert isinstance(used, int)
    size = f"{used / 1e9:.2f} GB" if used else ""
    detail = " ".join(str(result["detail"]).split())
    return f"| {result['name']} | {result['outcome']} | {result['took_s']:.0f} s | {size} | {detail} |"


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the names that one of the patterns matches (``engine-*``), in order, and what must run before them.

    Raises:
        ValueError: a pattern matches no case.
    """
    from benchmarks.gpu_smoke.cases import CASES

    if unknown := [pattern for pattern in patterns if not fnmatch.filter(CASES, pattern)]:
        raise ValueError(f"expected cases of {', '.join(CASES)}, got {', '.join(unknown)}")
    names = {name for pattern in patterns for name in fnmatch.filter(CASES, pattern)}
    return [name for name in CASES if name in names | {CASES[name].after for name in names}]


def run_all(names: Sequence[str], directory: Path, baseline: Path) -> int:
    """Run the cases one after the other, and print a row when each has ended. Write the figures to the file
    ``baseline``. Return how many failed.
    """
    from benchmarks.gpu_smoke.cases import CASES

    print("\n| case | result | took | device memory | found |\n|---|---|---|---|---|", flush=True)
    results: list[dict[str, object]] = []
    try:
        for number, name in enumerate(names, 1):
            deadline_s = CASES[name].deadline_s
            with Progress(quiet=not can_redraw(sys.stderr)) as progress:  # between rows, it must leave no lines
                progress.show(f"{name}, case {number} of {len(names)}, at most {deadline_s:.0f} s")
                results.append(run_apart(name, deadline_s, directory / name))
            print(line_of(results[-1]), flush=True)
    finally:  # also if the user interrupts it
        num_failed = _print_end(results, directory)
        _write_baseline(results, baseline)
    return num_failed


def _write_baseline(results: Sequence[dict[str, Any]], path: Path) -> None:
    figures = {f"{r['name']}: {name}": each for r in results for name, each in r.get("figures", {}).items()}
    content = {"machine": describe_machine(), "versions": package_versions(), "figures": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"figures: {path}; compare: python -m benchmarks.baselines compare OLD {path}")


def _print_end(results: Sequence[dict[str, object]], directory: Path) -> int:
    """Print the logs of cases that failed, and the counts. Return how many failed."""
    failed = [result for result in results if result["outcome"] == "FAILED"]
    for result in failed:
        log = directory / str(result["name"]) / "log.txt"
        print(f"\n{result['name']} failed; the end of {log}:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]))
    counts = {outcome: sum(r["outcome"] == outcome for r in results) for outcome in ("passed", "FAILED", "not run")}
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f"; logs: {directory}")
    return len(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_smoke", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="run these cases only; engine-* are all of that name")
    parser.add_argument("--list", action="store_true", help="list the cases and what they need")
    parser.add_argument("--directory", type=Path, help="for files and logs; a new temporary directory if left out")
    parser.add_argument("--here", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if missing := missing_packages():
        print(
            f"{sys.executable} lacks {', '.join(missing)}; install them, or name a Python that has them: "
            f"make gpu-smoke PYTHON=/path/to/python",
            file=sys.stderr,
        )
        return 2
    if options.here:
        run_here(options.here, options.directory)
        return 0
    from benchmarks.gpu_smoke.cases import CASES

    try:
        names = chosen(options.only or ["*"])
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        width = max(map(len, CASES))
        for case in CASES.values():
            needs = [f"CUDA devices: {case.num_devices}"] * bool(case.num_devices) + [case.package] * bool(case.package)
            print(f"{case.name:{width}s}  {', '.join(needs) or 'runs anywhere'}")
        return 0
    directory = options.directory or Path(tempfile.mkdtemp(prefix="gpu-smoke-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"--directory: expected a new or an empty directory, got {directory}, which has files")
    print(*describe_machine(), sep="\n")
    kept = options.directory or ROOT / "runs" / "baselines"
    try:
        return int(run_all(names, directory, kept / f"{time.strftime('%Y%m%d-%H%M%S')}.json") > 0)
    except KeyboardInterrupt:
        print("interrupted; the processes of the case that ran are killed", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
