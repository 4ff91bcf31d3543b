"""Does a long run stay as small as a short one? Memory, descriptors, threads and files of each role over many steps.

``async-rl launch`` runs with the fake backend and a tiny model, which make tens of steps a second. Every few seconds
the program looks at each process in ``/proc`` and counts the files in the run directory. It prints the first and the
last figures, and their slopes for every 1,000 steps: those of the straight line nearest to the figures after the first
fifth of the time, so that what a start needs is left out.

    python -m benchmarks.soak [--steps 20000] [--minutes 10] [--generators 2] [--every-s 5] [--dir DIR]

It ends the run at the limit of time with SIGINT, as Ctrl-C does. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w

from async_rl.extensions.quickstart import sums

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("launch", "queue", "learner", "generator", "evaluator")
STOP_LIMIT_S = 120.0
"""Longest time from SIGINT to the end of the run."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a process holds, or the run directory, after ``step`` optimizer steps.

    Attributes:
        who: role, process id; ``files`` for the run directory.
        figures: resident memory in kB, descriptors and threads, by name; for the directory the files and their kB.
    """

    who: str
    step: int
    figures: Mapping[str, float]


def write_config(directory: Path, *, num_steps: int, num_generators: int) -> Path:
    """Write a tiny task and the config of a run of fast steps to ``directory``, and return the config's path."""
    sums.write_model(directory / "model", seed=0)
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}:"}], "gt_answer": str(a + b)}
        for a, b in sums.split_pairs(0)["rl"][:256]
    ]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": str(directory / "model")},
        "data": {"train": str(directory / "train.jsonl"), "system_prompt": ""},
        "sampling": {"group_size": 2, "max_new_tokens": 4, "max_prompt_tokens": 16},
        "queue": {"max_staleness": 4, "filter_range": []},
        "loss": {"mask_truncated": False},
        "learner": {"steps": num_steps, "groups_per_step": 2, "max_tokens": 512, "num_threads": 1},
        "optimizer": {"lr": 1e-6},
        "generator": {"backend": "fake", "count": num_generators, "batch_size": 8, "num_threads": 1},
        "experimental": {"fake": {"mean_tokens": 3.0, "vocab_size": 12}},
        "checkpoint": {"every": 1000},
    }
    path = directory / "soak.toml"
    path.write_text(tomli_w.dumps(config), encoding="utf-8")
    return path


def processes_under(pid: int) -> dict[str, int]:
    """Return the ids of the process ``pid`` and of its descendants that are roles, as ``learner 123``: 123."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: dict[str, int] = {}
    waiting = [pid]
    while waiting:
        at = waiting.pop()
        waiting += children.get(at, [])
        if role := _role_of(at):
            found[f"{role} {at}"] = at
    return found


def _role_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((word for word in words if word in ROLES), "")


def look_at_process(who: str, pid: int, step: int) -> Look | None:
    """Return what a process holds; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "VmRSS" not in fields:  # a zombie
        return None
    memory_kb, threads = float(fields["VmRSS"].split()[0]), float(fields["Threads"])
    return Look(who, step, {"kB": memory_kb, "descriptors": float(num_descriptors), "threads": threads})


def look_at_files(directory: Path, step: int) -> Look:
    sizes: list[int] = []
    for path in directory.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:  # removed since
            continue
        sizes.append(found.st_size)
    return Look("files", step, {"files": float(len(sizes)), "kB": sum(sizes) / 1024})


class StepCount:
    """Counts the steps in a growing ``metrics.jsonl`` by its lines, of which the run writes one a step."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._steps = path, 0, 0

    def now(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            self._offset += len(data)
            self._steps += data.count(b"\n")
        return self._steps


def slope(looks: Sequence[Look], key: str) -> float:
    """Return how much a figure grows in 1,000 steps, without the first fifth of the looks; NaN if there are too few."""
    late = looks[len(looks) // 5 :]
    steps = np.array([look.step for look in late], dtype=float)
    if len(late) < 3 or steps[0] == steps[-1]:
        return float("nan")
    return float(np.polyfit(steps / 1000, [look.figures[key] for look in late], 1)[0])


def table(looks: Sequence[Look]) -> list[str]:
    """Return lines of text: for each process and figure the first value, the last, the highest and the slope."""
    lines = [f"{'':22}{'figure':>12}{'first':>12}{'last':>12}{'highest':>12}{'per 1,000 steps':>18}"]
    for who in dict.fromkeys(look.who for look in looks):
        own = [look for look in looks if look.who == who]
        for key in own[0].figures:
            values = [look.figures[key] for look in own]
            lines.append(
                f"{who:22}{key:>12}{values[0]:12,.0f}{values[-1]:12,.0f}{max(values):12,.0f}{slope(own, key):18,.2f}"
            )
    return lines


def soak(directory: Path, *, num_steps: int, minutes: float, num_generators: int, every_s: float) -> list[Look]:
    """Run the roles for so many steps or minutes, and return all looks.

    Raises:
        RuntimeError: the run failed.
    """
    config = write_config(directory, num_steps=num_steps, num_generators=num_generators)
    steps = StepCount(directory / "run" / "metrics.jsonl")
    looks: list[Look] = []
    log = directory / "launch.log"
    with log.open("wb") as out:
        launch = subprocess.Popen(
            [sys.executable, "-m", "async_rl", "launch", str(config)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 60 * minutes
        try:
            while launch.poll() is None and time.monotonic() < end:
                if step := steps.now():
                    found = [look_at_process(who, pid, step) for who, pid in processes_under(launch.pid).items()]
                    looks += [look for look in found if look is not None]
                    looks.append(look_at_files(directory / "run", step))
                time.sleep(every_s)
            if is_stopped := launch.poll() is None:
                launch.send_signal(signal.SIGINT)
            code = launch.wait(STOP_LIMIT_S)
        finally:
            if launch.poll() is None:
                os.killpg(launch.pid, signal.SIGKILL)
    if not is_stopped and code != 0:
        raise RuntimeError(f"expected a run that succeeds, got exit code {code}; its output is in {log}")
    return looks


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory, descriptors, threads and files of each role over many steps.")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--dir", type=Path, default=None, help="an empty directory to keep; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.dir or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        looks = soak(
            directory, num_steps=arguments.steps, minutes=arguments.minutes, num_generators=arguments.generators,
            every_s=arguments.every_s,
        )  # fmt: skip
    if not looks:
        raise SystemExit("soak: expected at least one step, got none; raise --minutes, or keep the log with --dir")
    print(f"{looks[-1].step:,} steps")
    print("\n".join(table(looks)))


if __name__ == "__main__":
    main()
