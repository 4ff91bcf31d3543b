"""What a page shows of one run, as plain data: curves, who waited for whom, ages of tokens, ledger, settings, notes.

``read_run`` reads the run directory, also that of a running run, and changes nothing in it. Long runs are thinned out
(``run.records.thinning``), so the size of the result has a limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from async_rl.config.config import Config
from async_rl.config.document import tables
from async_rl.config.loading import load_run_config, plain_values
from async_rl.errors import ConfigError, RunError
from async_rl.extensions.insight.comparison.summary import lags, means_of
from async_rl.extensions.insight.pictures.thinning import thinned
from async_rl.launch.hints import Hints
from async_rl.run.config_changes import read_changes
from async_rl.run.directory import RunDir
from async_rl.run.figures.progress import is_step_row, who_waits
from async_rl.run.lock import holder_of
from async_rl.run.records.metric_table import PANELS, SHOWN, curves, unit_of
from async_rl.run.records.starts import first_steps, read_origin, warm_steps
from async_rl.run.records.step_log import Row, eval_figures, iter_metrics, mean_of

Plain = dict[str, Any]

MAX_POINTS = 600
"""Points of a curve. More than a screen has pixels for are no use."""
MAX_BARS = 240
"""Bars of the timeline; each stands for some steps that follow each other."""
_MAX_NOTES = 200
_LEARNER_PARTS = {
    "train": "time/train_s",
    "wait": "time/wait_s",
    "publish": "time/publish_s",
    "checkpoint": "time/checkpoint_s",
}
_GENERATOR_WAITS = ("grading", "environment", "weights", "leases")
_LANES = {"grading": "time/grading_s", "environment": "time/environment_s", "transfer": "time/transfer_s"}
"""Lane of the timeline -> seconds of a step in which it was busy, at the same time as everything else."""
_LANES_READ = ("time/grading_s", "time/environment_s")
_READINGS = ("idle/generators", *(f"idle/{name}" for name in _GENERATOR_WAITS), *_LANES_READ)


def read_run(path: Path) -> Plain:
    """Return what the page shows of the run in the directory ``path``.

    Raises:
        RunError: there is no run, or one of its files is damaged.
    """
    run_dir = RunDir(path)
    rows = [row for row in iter_metrics(run_dir.metrics) if is_step_row(row)]
    if not run_dir.config.is_file() or not run_dir.metrics.is_file():
        raise RunError(
            f"expected a run directory with config.toml and metrics.jsonl, got {path}; give the run.dir of a run"
        )
    config = _config(run_dir)
    origin = read_origin(run_dir, "delete it, and the report does not name the run's origin")
    evals = _evaluations(iter_metrics(run_dir.metrics))
    starts, last = first_steps(run_dir), rows[-1] if rows else {}
    warm = warm_steps(rows, starts)
    ledger = run_dir.read_ledger()
    return {
        "name": path.resolve().name,
        "path": str(path),
        "state": run_state(run_dir),
        "step": last.get("step", 0),
        "steps": config.learner.steps if config else None,
        "elapsed_s": last.get("time_s", 0.0),
        "starts": starts[1:],
        "origin": origin.label if origin else "",
        "columns": _columns(run_dir),
        "evals": evals,
        "timeline": timeline(rows),
        "who_waits": who_waits(warm),
        "lags": [{**lag, "kl": short(lag["kl"]), "ess": short(lag["ess"])} for lag in lags(rows)],
        "ledger": {unit: ledger[unit] for unit in ("groups", "rollouts", "tokens") if unit in ledger},
        "outcomes": ledger.get("outcomes", {}),
        "settings": _settings(config) if config else [],
        "config_text": "" if config else run_dir.config.read_text(encoding="utf-8", errors="replace"),
        "changes": [{"step": change.step, "changed": change.changed} for change in read_changes(run_dir)],
        "notes": _notes(run_dir),
        "headline": _headline(rows, warm, evals),
    }


def run_state(run_dir: RunDir) -> str:
    """Return "finished", "exporting" while a living process writes the trained model, or "not finished"."""
    is_exporting = any(run_dir.path.glob(f".{run_dir.export.name}.*.partial"))
    if run_dir.is_finished or not is_exporting:
        return "finished" if run_dir.is_finished else "not finished"
    return "exporting" if (holder := holder_of(run_dir.lock)) is not None and holder.may_live else "not finished"


def _config(run_dir: RunDir) -> Config | None:
    """Return the run's config. None if this version can't read it: the page then shows its text."""
    try:
        return load_run_config(run_dir.config)
    except ConfigError:
        return None


def _columns(run_dir: RunDir) -> dict[str, list[float | None]]:
    """Return every metric of the steps, ``step`` among them, with MAX_POINTS values or fewer, None where missing."""
    keys = dict.fromkeys(
        key for row in iter_metrics(run_dir.metrics) if is_step_row(row) for key in row if not key.startswith("eval/")
    )
    keys.pop("step", None)
    rows = thinned(iter_metrics(run_dir.metrics), tuple(keys), max_points=MAX_POINTS)
    steps = [row for row in rows if "version" in row]
    return {key: [short(row.get(key)) for row in steps] for key in ("step", *keys)}


def _evaluations(rows: Iterable[Row]) -> dict[str, Plain]:
    """Return step, seconds, accuracy and standard error of every evaluation, by data set."""
    evaluations: dict[str, Plain] = {}
    for row in rows:
        for name, figures in eval_figures(row, "accuracy").items():
            of_set = evaluations.setdefault(name, {"step": [], "time_s": [], "accuracy": [], "se": []})
            values = row["step"], row.get("time_s"), figures["accuracy"], figures.get("accuracy_se")
            for column, value in zip(of_set.values(), values, strict=True):
                column.append(short(value))
    return evaluations


def timeline(rows: Sequence[Row]) -> Plain:
    """Return who worked and who waited, in at most ``MAX_BARS`` bars along the seconds of the run.

    ``learner`` and ``generators`` have shares of a bar's time by what they did, which add up to 1. The generators'
    shares are means over all of them; they are None where nothing was measured. The lanes of ``_LANES`` may overlap.
    """
    rows = _with_readings(rows)
    each = max(1, math.ceil(len(rows) / MAX_BARS))
    bars = [_bar(rows[at : at + each]) for at in range(0, len(rows), each)]
    columns: Plain = {key: [bar[key] for bar in bars] for key in ("begin", "end", "steps", *_LANES)}
    for side in ("learner", "generators"):
        columns[side] = {name: [bar[side][name] for bar in bars] for name in (bars[0][side] if bars else ())}
    return columns


def _with_readings(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the generators' figures of the next row that has any, where a row has none.

    Generators report with their heartbeats. What they report is about the time since the heartbeat before.
    """
    filled: list[Row] = []
    reading: Row = {}
    for row in reversed(rows):
        if row.get("idle/generators") is not None:
            reading = {key: row[key] for key in _READINGS if row.get(key) is not None}
            reading |= {key: row[key] / (row.get("time/step_s") or 1e-9) for key in _LANES_READ if key in reading}
        own_s = row.get("time/step_s") or 0.0
        filled.append({**reading, **{key: reading[key] * own_s for key in _LANES_READ if key in reading}, **row})
    return filled[::-1]


def _bar(rows: Sequence[Row]) -> Plain:
    wall = sum(row.get("time/step_s") or 0.0 for row in rows) or 1e-9

    def share(key: str) -> float:
        return min(1.0, sum(row.get(key) or 0.0 for row in rows) / wall)

    measured = [row for row in rows if row.get("idle/generators") is not None]
    idle = {name: mean_of(measured, f"idle/{name}", "time/step_s") or 0.0 for name in ("generators", *_GENERATOR_WAITS)}
    generators = {"decode": 1.0 - idle.pop("generators"), **idle}
    return {
        "begin": short(rows[0]["time_s"] - (rows[0].get("time/step_s") or 0.0)),
        "end": short(rows[-1]["time_s"]),
        "steps": [rows[0]["step"], rows[-1]["step"]],
        "learner": _with_rest({name: share(key) for name, key in _LEARNER_PARTS.items()}),
        "generators": _with_rest(generators) if measured else dict.fromkeys((*generators, "other")),
        **{lane: short(share(key)) for lane, key in _LANES.items()},
    }


def _with_rest(shares: Mapping[str, float]) -> dict[str, float | None]:
    """Return the shares with ``other``, so that they add up to 1. Readings that overlap are scaled down."""
    total = sum(shares.values())
    scaled = {name: value / max(1.0, total) for name, value in shares.items()}
    return {name: short(value) for name, value in {**scaled, "other": max(0.0, 1.0 - total)}.items()}


def _settings(config: Config) -> list[Plain]:
    """Return every key of the config with value, default and description; first those that differ from the default."""
    values = plain_values(config)
    keys = {key.name: key for table in tables() for key in table.keys}
    default = {name: _plain(key.default) for name, key in keys.items()}
    return [
        {
            "key": name,
            "value": _shown(value),
            "default": _shown(default.get(name)),
            "changed": name not in keys or value != default[name],
            "description": keys[name].description if name in keys else "",
        }
        for name, value in values.items()
    ]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _shown(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) and value else json.dumps(value)


def _notes(run_dir: RunDir) -> list[Plain]:
    """Return the notes on the metrics and on the queue's groups, and the newest lines of ``notes.log``."""
    hints, notes = Hints(), list[Plain]()
    for row in iter_metrics(run_dir.metrics):
        step = row["step"]
        texts = (line.removeprefix("note: ").removeprefix(f"step {step}: ") for line in hints.add(row))
        notes += [{"step": step, "text": text} for text in texts]
    if run_dir.ledger.exists():
        notes += [{"step": None, "text": text} for text in run_dir.read_ledger().get("group_notes", {}).values()]
    if run_dir.notes.is_file():
        lines = run_dir.notes.read_text(encoding="utf-8", errors="replace").splitlines()
        notes += [{"step": None, "text": line} for line in lines[-_MAX_NOTES:]]
    return notes


def _headline(rows: Sequence[Row], warm: Sequence[Row], evals: Mapping[str, Plain]) -> list[Plain]:
    """Return the figures at the top of the page, each with label, value and what it says; means are over ``warm``."""
    firsts_and_lasts = {f"accuracy on {n}": (of["accuracy"][0], of["accuracy"][-1]) for n, of in evals.items()}
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if rewards and not evals:
        count = max(1, len(rewards) // 10)
        firsts_and_lasts["mean reward"] = fmean(rewards[:count]), fmean(rewards[-count:])
    figures = [(label, f"{last:.3g}", f"from {first:.3g}") for label, (first, last) in firsts_and_lasts.items()]
    if rows:
        seconds = sum(row.get("time/step_s") or 0.0 for row in rows) or 1e-9
        trained = sum(row["tokens/trained"] for row in rows)
        figures.append(("trained tokens", compact(trained), f"{compact(trained / seconds)} per s"))
        figures.append(("seconds per step", f"{seconds / len(rows):.3g}", f"{len(rows)} steps"))
    for key, mean in means_of(warm).items():
        heading, form = SHOWN[key].column or ("", "")
        if heading and mean is not None:
            figures.append((heading, format(mean, form), PANELS[SHOWN[key].panel].unit if SHOWN[key].panel else ""))
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in figures]


def short(value: Any) -> Any:
    """Return a number with six significant digits, as JSON text of it is shorter; None as it is."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def compact(value: float) -> str:
    """Return a count as short text, such as 1.2k or 3.4M."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def panels() -> list[Plain]:
    """Return what the page's script draws: the panels of ``PANELS`` with their curves, without those of evaluations."""
    return [
        {
            "section": panel.section, "title": title, "unit": unit_of(title), "from": panel.low, "to": panel.high,
            "log": panel.is_log, "evals": "eval/<dataset>/accuracy" in curves(title),
            "curves": [{"key": key, "label": own.label, "least": own.least} for key, own in curves(title).items()],
        }
        for title, panel in PANELS.items()
    ]  # fmt: skip
