"""Tables that show runs side by side, and the JSON object with the same figures."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_rl.extensions.insight.comparison.advice import Advice, advise
from async_rl.extensions.insight.comparison.points import common_target, reached
from async_rl.extensions.insight.comparison.summary import Evaluation, RunSummary, summarise
from async_rl.extensions.insight.evaluation.table import aligned, cell
from async_rl.run.records.metric_table import columns

_OLD_NAMES = {"overlap/efficiency": "overlap", "ratio/ess": "ess", "ratio/clip_fraction": "clip_fraction"}
"""Names in the JSON object of metrics that are not called by their keys there."""
_WIDTH = 80
_WRAP = textwrap.TextWrapper(_WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
MAX_LAGS = 8
"""Number of lags that the table of the mismatch shows. ``--json`` has all."""


def compared(paths: Sequence[Path]) -> tuple[list[str], dict[str, Any]]:
    """Return ``comparison_lines`` and ``comparison_json`` of the runs in the directories ``paths``."""
    summaries = [summarise(path) for path in paths]
    advice = advise(summaries)
    return comparison_lines(summaries, advice), comparison_json(summaries, advice)


def comparison_lines(summaries: Sequence[RunSummary], advice: Advice) -> list[str]:
    """Return the lines that ``async-rl compare`` prints: tables of speed, staleness and learning, then the advice."""
    names = short_names([summary.name for summary in summaries])
    steps = [[str(run.num_steps), cell(run.steps_per_s, ".3g", run.speed_error)] for run in summaries]
    lost = [[cell(run.dropped, ".1%"), cell(run.masked, ".1%")] for run in summaries]
    speed = _table(names, summaries, "time/step_s", ["steps", "steps/s"], steps)
    age = _table(names, summaries, "tokens/trained", ["dropped", "masked"], lost)
    lines = ["Speed", *speed, *_origins(names, summaries), *_changes(names, summaries), ""]
    lines += ["Age of the data, in versions, and what it costs", *age, ""]
    lags = sorted({lag for summary in summaries for lag in summary.mismatch_by_lag})[:MAX_LAGS]
    if lags:
        lines += ["KL(behavior policy || policy) by age of a token, in nats"]
        rows = [[cell(summary.mismatch_by_lag.get(lag), ".1e") for lag in lags] for summary in summaries]
        lines += [*_aligned(["run", *(f"{lag}" for lag in lags)], names, rows), ""]
    lines += _learning(names, summaries)
    sentence = textwrap.wrap(advice.sentence, _WIDTH, break_on_hyphens=False)
    return [*lines, *sentence, *(line for reason in advice.reasons for line in _WRAP.wrap(reason))]


def comparison_json(summaries: Sequence[RunSummary], advice: Advice) -> dict[str, Any]:
    """Return the figures of the tables and the advice as plain data."""
    runs = []
    for summary in summaries:
        figures = {name: getattr(summary, name) for name in RunSummary.__dataclass_fields__ if name != "config"}
        figures |= {_OLD_NAMES.get(key, key.replace("/", "_")): mean for key, mean in figures.pop("means").items()}
        figures["origin"] = None if summary.origin is None else asdict(summary.origin)
        figures["changes"] = [asdict(change) for change in summary.changes]
        figures["evaluations"] = {name: [asdict(one) for one in found] for name, found in summary.evaluations.items()}
        runs.append({"bound": summary.bound, **figures})
    return {
        "runs": runs,
        "advice": advice.sentence,
        "reasons": list(advice.reasons),
        "bound": advice.bound,
        "is_certain": advice.is_certain,
    }


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of run directories without the parent directories that all of them share."""
    if len(set(names)) < 2:
        return [os.path.basename(os.path.normpath(name)) or name for name in names]
    paths = [os.path.abspath(name) for name in names]
    return [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]


def _learning(names: Sequence[str], summaries: Sequence[RunSummary]) -> list[str]:
    """Return a table for each dataset: the last accuracy, and when a run reached what all runs have reached."""
    lines: list[str] = []
    for dataset in sorted({dataset for summary in summaries for dataset in summary.evaluations}):
        target = common_target(summaries, dataset)
        lines.append(f"Learning: accuracy on {dataset}; every run reached {target:.3f}")
        rows = [_learning_row(summary, summary.evaluations.get(dataset, ()), target) for summary in summaries]
        lines += [*_aligned(["run", "reward", "accuracy", "reached at step", "after s"], names, rows), ""]
    if not lines:
        rows = [[cell(summary.reward, ".3f")] for summary in summaries]
        lines = ["Learning", *_aligned(["run", "reward"], names, rows), ""]
    return lines


def _learning_row(summary: RunSummary, evaluations: Sequence[Evaluation], target: float) -> list[str]:
    first, last = reached(evaluations, target), evaluations[-1] if evaluations else None
    return [
        cell(summary.reward, ".3f"),
        "-" if last is None else cell(last.accuracy, ".3f", last.error, error_form=".3f"),
        cell(None if first is None else first.step, "d"),
        cell(None if first is None else first.time_s, ".1f"),
    ]


def _origins(names: Sequence[str], summaries: Sequence[RunSummary]) -> list[str]:
    """Return a sentence for each run that is a fork."""
    return [
        line
        for name, summary in zip(names, summaries, strict=True)
        if summary.origin is not None
        for line in _WRAP.wrap(
            f"{name} is a fork of {summary.origin.label}: its steps are {summary.first_step} to "
            f"{summary.last_step}, and its seconds begin there"
        )
    ]


def _changes(names: Sequence[str], summaries: Sequence[RunSummary]) -> list[str]:
    """Return a sentence for each config key that changed during a run, or between a fork and its origin."""
    return [
        line
        for name, summary in zip(names, summaries, strict=True)
        for change in summary.changes
        for key, (old, new) in change.changed.items()
        if key != "learner.steps"
        for line in _WRAP.wrap(f"{name}: {key} was {old} until step {change.step}, then {new}")
    ]


def _table(
    names: Sequence[str], summaries: Sequence[RunSummary], weight: str, headings: Sequence[str],
    cells: Sequence[Sequence[str]],
) -> list[str]:  # fmt: skip
    """Return a table of the bounds, of further columns (``headings``, ``cells``), and of the means with ``weight``."""
    means = columns(weight)
    rows = [
        [str(run.bound), *own, *(cell(run.means[key], form) for key, (_, form) in means.items())]
        for run, own in zip(summaries, cells, strict=True)
    ]
    return _aligned(["run", "bound", *headings, *(heading for heading, _ in means.values())], names, rows)


def _aligned(headings: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with the names of the runs in front, indented by two."""
    named = [[name, *row] for name, row in zip(names, rows, strict=True)]
    return [f"  {line}" for line in aligned([headings, *named])]
