"""Healthy and sick runs, by which the limits of ``run/figures/health.py`` were set, and their rows in the tests.

``python -m tests.run.health_runs DIRECTORY NAME ...`` makes the named runs, one after the other, in the checkout: on
two free cores about half a minute each. ``tests/data/health_runs.toml`` says how, and what they show; their figures are
written to ``tests/data/health_runs.json``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from async_rl.run.figures.health import KEYS
from async_rl.run.figures.progress import eval_accuracies, is_step_row
from async_rl.run.records.step_log import Row, read_rows

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data" / "health_runs.json"
_MADE: dict[str, Any] = tomllib.loads(DATA.with_suffix(".toml").read_text(encoding="utf-8"))
HEALTHY, SICK = _MADE["healthy"], _MADE["sick"]
MAX_STEPS = 64
"""Steps of a sick run that are kept; of a healthy one all are."""


def made_by(name: str) -> tuple[str, dict[str, Any]]:
    """Return the config and the settings of a run."""
    run = {**HEALTHY, **SICK}[name]
    base = _MADE["bases"][run["base"]]
    of_base = {key: text.format(seed=run["seed"], lag=run.get("lag")) for key, text in base["settings"].items()}
    return base["config"], of_base | run.get("settings", {})


def make(name: str, directory: Path) -> None:
    """Make a run in ``directory``."""
    config, settings = made_by(name)
    plain = {**settings, "run.dir": directory, "checkpoint.every": 0, "log.rollouts_every": 0}
    options = [word for key, value in plain.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "async_rl", "launch", config, "--fresh", *options]
    subprocess.run(command, cwd=ROOT, check=True)


def figures(rows: Sequence[Row]) -> list[list[float | None]]:
    """Return step, version and the figures of ``health.KEYS`` of each step, rounded to four digits."""
    return [[_rounded(row.get(name)) for name in ("step", "version", *KEYS)] for row in rows if is_step_row(row)]


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def evaluations(rows: Sequence[Row]) -> list[list[Any]]:
    """Return the evaluations: how many steps are recorded before, the step, the set, the accuracy and its error."""
    found: list[list[Any]] = []
    num_steps = 0
    for row in rows:
        num_steps += is_step_row(row)
        for name, accuracy in eval_accuracies(row).items():
            error = row[f"eval/{name}/accuracy_se"]
            found.append([num_steps, row["step"], name, _rounded(accuracy), _rounded(error)])
    return found


def load() -> dict[str, list[Row]]:
    """Return the rows of every run in ``tests/data/health_runs.json``, by its name.

    Some runs were made before ``accuracy/received`` was measured. Without a filter it is the ``accuracy/mean`` of the
    step before, but for groups that were dropped.
    """
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    names, evals = stored.pop("columns"), stored.pop("evaluations")
    runs: dict[str, list[Row]] = {}
    for run, steps in stored.items():
        rows = [dict(zip(names, row, strict=False)) for row in steps]
        if made_by(run)[1].get("queue.filter_range") == "[]" and "accuracy/received" not in rows[-1]:
            for before, row in pairwise(rows):
                row["accuracy/received"] = before["accuracy/mean"]
        of_evals = [
            (count, {"step": step, f"eval/{name}/accuracy": accuracy, f"eval/{name}/accuracy_se": error})
            for count, step, name, accuracy, error in evals.get(run, ())
        ]
        parts = [(count, row) for count, row in enumerate(rows, 1)] + of_evals
        runs[run] = [row for _, row in sorted(parts, key=lambda part: part[0])]
    return runs


def main() -> None:
    directory, *names = sys.argv[1:]
    stored: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    stored["columns"] = ["step", "version", *KEYS]
    for name in names:
        run_dir = Path(directory) / name
        shutil.rmtree(run_dir, ignore_errors=True)
        make(name, run_dir)
        rows = read_rows(run_dir / "metrics.jsonl")
        stored[name] = figures(rows)[: MAX_STEPS if name in SICK else None]
        stored["evaluations"][name] = [entry for entry in evaluations(rows) if entry[0] <= len(stored[name])]
    lines = [f"{json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in stored.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
