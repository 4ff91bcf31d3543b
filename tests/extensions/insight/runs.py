"""Run directories as a finished run leaves them, with figures that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.extensions.insight.comparison.summary import RunSummary, summarise


def step_row(step: int, **figures: Any) -> dict[str, Any]:
    """A step's row. ``figures`` are keys with ``__`` for the slash."""
    row = {
        "step": step, "version": step, "time_s": float(step), "reward/mean": 0.5, "time/step_s": 1.0,
        "tokens/trained": 100, "ratio/ess": 1.0, "ratio/clip_fraction": 0.0, "staleness/mean": 1.0, "staleness/max": 2,
        "idle/learner": 0.0,
    }  # fmt: skip
    return row | {key.replace("__", "/"): value for key, value in figures.items()}


def eval_row(step: int, accuracy: float, error: float = 0.01, *, time_s: float | None = None) -> dict[str, Any]:
    return {
        "step": step, "time_s": float(step) if time_s is None else time_s,
        "eval/math/accuracy": accuracy, "eval/math/accuracy_se": error,
    }  # fmt: skip


def write_run(
    path: Path, rows: Sequence[dict[str, Any]], *, bound: int = 4, ledger: dict[str, Any] | None = None,
    starts: Sequence[int] = (), forked_at: int | None = None, **sections: Any,
) -> Path:  # fmt: skip
    """Write a run's files.

    Args:
        rows: the rows of its metrics.
        bound: its ``queue.max_staleness``.
        ledger: the content of ``ledger.json``.
        starts: the first steps of its learner's starts. If empty, there is no ``trained.jsonl``.
        forked_at: if given, the run is a fork of ``runs/source`` at this step.
        sections: sections of its config.
    """
    path.mkdir(parents=True)
    sections.setdefault("run", {})["dir"] = str(path)
    sections.setdefault("queue", {})["max_staleness"] = bound
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d.jsonl"}, **sections})
    (path / "config.toml").write_text(config_to_toml(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if starts:
        steps = [row["step"] for row in rows if "version" in row]
        lines = [{"step": step, "lineage": f"{sum(start <= step for start in starts)}"} for step in steps]
        (path / "trained.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if forked_at is not None:
        (path / "origin.json").write_text(json.dumps({"run_dir": "runs/source", "run_id": "a", "step": forked_at}))
    if ledger is not None:
        (path / "ledger.json").write_text(json.dumps(ledger))
    return path


def a_run(
    path: Path, bound: int, step_s: float, *, seed: int = 0, num_steps: int = 10, more: Sequence[dict[str, Any]] = ()
) -> RunSummary:
    """Return the summary of a run whose steps all take ``step_s``. ``more`` are further rows of its metrics."""
    rows = [step_row(step, time__step_s=step_s) for step in range(1, num_steps + 1)]
    return summarise(write_run(path, [*rows, *more], bound=bound, run={"seed": seed}))
