"""What ``async-rl launch`` and ``async_rl.train`` print at the end of a run, and ``async_rl.Run.summary`` returns."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from async_rl.config.config import Config
from async_rl.launch.hints import Hints, best_lines
from async_rl.run.directory import RunDir
from async_rl.run.figures.progress import duration, eval_accuracies
from async_rl.run.records.step_log import Row, iter_metrics, last_step

_MOSTLY_FILTERED = 0.75
"""Share of filtered groups from which on the summary says so."""
_COMPARED, _FEWEST = 10, 8
"""Number of steps at either end of a run whose sampled answers are compared, and the fewest steps of such a run."""


def summary(run_dir: RunDir, wall_s: float | None = None, *, has_notes: bool = True) -> list[str]:
    """Return the lines of text that ``launch`` prints at the end of a run, at most six without notes.

    They show the number of steps, the first and last accuracy on each evaluation set and the best one if it came
    earlier, or of the sampled answers if there is no evaluation, what went wrong with the training, the counts of the
    ledger, and the run's files. ``wall_s`` is the duration of this launch in seconds. If None, the lines leave it out.
    Without ``has_notes`` so are the notes, because a view has shown each.
    """
    steps, hints = 0, Hints()
    notes: list[str] = []
    evaluations: list[Row] = []
    sampled: list[float] = []
    evals: dict[str, list[float]] = {}
    for row in iter_metrics(run_dir.metrics):
        steps = max(steps, row["step"])
        notes += hints.add(row)
        sampled += [row["accuracy/received"]] if "accuracy/received" in row else []
        evaluations += [row] if eval_accuracies(row) else []
        for dataset, accuracy in eval_accuracies(row).items():
            evals.setdefault(dataset, []).append(accuracy)
    state = "finished" if run_dir.is_finished else "not finished"
    lines = [f"{state}: {steps} steps{'' if wall_s is None else f', this launch took {duration(wall_s)}'}"]
    changes = [f"{name}: {values[0]:.3f} -> {values[-1]:.3f}" for name, values in evals.items()]
    lines += [f"accuracy on {', on '.join(changes)}"] if changes else sampled_lines(sampled)
    lines += best_lines(run_dir, evaluations)[:1]
    lines += notes if has_notes else []
    if run_dir.ledger.exists():
        ledger = run_dir.read_ledger()
        of_groups = [f"note: {text}" for text in ledger.get("group_notes", {}).values()]
        lines += [ledger_line(ledger), *(of_groups if has_notes else []), *([] if of_groups else filter_note(ledger))]
    answers = next(filter(None, map(_answers, (run_dir.eval, run_dir.rollouts))), [])
    paths = [path for path in (run_dir.curve, *answers[-1:], run_dir.export) if path.exists()]
    files = ", ".join(str(path.relative_to(run_dir.path)) for path in paths)
    lines.append(f"run directory: {run_dir.path}{files and f' ({files})'}")
    return lines


def _answers(directory: Path) -> list[Path]:
    """Return the files of answers of steps, the newest last."""
    return sorted(directory.glob("*step-*.jsonl"), key=lambda path: path.stat().st_mtime)


def sampled_lines(accuracies: Sequence[float]) -> list[str]:
    """Return a line about the accuracy of all sampled answers at both ends of a run, or none if it had too few steps.

    Trained answers can't tell whether a run has learned, because ``queue.filter_range`` chooses among them.
    ``accuracies`` are the values of ``accuracy/received``, in the order of the steps.
    """
    if len(accuracies) < _FEWEST:
        return []
    count = min(_COMPARED, len(accuracies) // 2)
    first, last = fmean(accuracies[:count]), fmean(accuracies[-count:])
    return [
        f"accuracy of all sampled answers: {first:.3f} -> {last:.3f} (first and last {count} steps; set data.eval to "
        f"measure it on rows that are not trained on)"
    ]


def next_lines(run_dir: RunDir, config: Config) -> list[str]:
    """Return lines with commands to try after the finished run of ``config``."""
    trained = last_step(run_dir.metrics)
    has_ended_early = trained < config.learner.steps  # the data did
    more = f"data.epochs={(config.data.epochs or 1) + 1}" if has_ended_early else f"learner.steps={2 * trained}"
    return [
        f"next: async-rl report {shlex.quote(str(run_dir.path))}    # a page: curves, who waited, single answers",
        f"      async-rl launch {shlex.quote(str(run_dir.config))} --set {more}    # trains on",
    ]


def ledger_line(ledger: Mapping[str, Any]) -> str:
    """Return one line of text about a ledger, the content of ``ledger.json``.

    The line shows how many groups were issued, and how many of them are in each state, such as ``trained 8``. States
    without groups are left out.
    """
    groups = ledger["groups"]
    terms = [
        f"{name} {groups[name]}" for name in ("in_flight", "queued", "taken", "trained", "filtered") if groups[name]
    ]
    terms += [f"dropped as {cause} {count}" for cause, count in groups["dropped"].items() if count]
    return f"groups: issued {groups['issued']} = {' + '.join(terms) or '0'}"


def filter_note(ledger: Mapping[str, Any]) -> list[str]:
    """Return a line of text if most groups of the ledger that have ended were filtered; no line otherwise."""
    groups = ledger["groups"]
    share = groups["filtered"] / max(1, groups["filtered"] + groups["trained"] + sum(groups["dropped"].values()))
    if share < _MOSTLY_FILTERED:
        return []
    return [
        f"note: {share:.0%} of these groups were filtered, because nearly all their answers were right, or nearly all "
        f"wrong; easier or harder prompts, or a graded accuracy, would teach more (queue.filter_range)"
    ]
