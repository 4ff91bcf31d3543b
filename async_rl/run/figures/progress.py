"""The progress of a run from the rows of ``metrics.jsonl``: the figures to show, and a line of text for each step.

``launch`` reads the rows as they are written. A learner that was started by hand logs the same lines itself.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from async_rl.run.records.metric_table import SHOWN, SUBJECTS, curves
from async_rl.run.records.step_log import Row, eval_figures, mean_of

ETA_STEPS = 20

logger = logging.getLogger(__name__)

MUCH_IDLE = 0.1
"""Share of the time from which a side counts as idle."""


class StepLines:
    """Logs a line for each optimizer step. Call ``add`` with each row of ``metrics.jsonl`` when it is written."""

    def __init__(self, num_steps: int) -> None:
        self._progress = RunProgress(num_steps, [])

    def add(self, row: Row) -> None:
        self._progress.add(row)
        if is_step_row(row):
            logger.info(step_line(self._progress))


class RunProgress:
    """Collects the figures to show from the rows of ``metrics.jsonl``.

    Attributes:
        num_steps: the number of steps of the whole run.
        step_row: the row of the newest step; empty before the first step.
        rows: the rows of the last ``ETA_STEPS`` steps of this launch.
        evals: for each evaluation set, pairs (step, accuracy) in the order of the evaluations.
        newest_eval: the newest of these as text, with a short name; empty before the first one.
    """

    def __init__(self, num_steps: int, history: Iterable[Row]) -> None:
        self.num_steps = num_steps
        self.step_row: Row = {}
        self.newest_eval = ""
        self.evals: dict[str, list[tuple[int, float]]] = {}
        self.rows: deque[Row] = deque(maxlen=ETA_STEPS)
        for row in history:
            self.add(row)
        self.rows.clear()

    @property
    def is_training(self) -> bool:
        """Whether this launch has trained a step, and has further steps to train."""
        return bool(self.rows) and self.step_row["step"] < self.num_steps

    def add(self, row: Row) -> None:
        """Take the figures from ``row``, the next row of ``metrics.jsonl``."""
        for dataset, accuracy in eval_accuracies(row).items():
            self.evals.setdefault(dataset, []).append((row["step"], accuracy))
            self.newest_eval = f"{dataset[:12]} {accuracy:.3f} @{row['step']}"
        if is_step_row(row):
            if self.rows and row["step"] <= self.rows[-1]["step"]:
                self.rows.clear()  # rolled back: measure the pace again
            self.step_row = row
            self.rows.append(row)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the run's last step, at the pace of the last ``ETA_STEPS`` steps.

        None if this launch has seen fewer than two steps.
        """
        if len(self.rows) < 2:
            return None
        first, last = self.rows[0], self.rows[-1]
        pace = (last["time_s"] - first["time_s"]) / (last["step"] - first["step"])
        return pace * max(0, self.num_steps - last["step"])


def idle_text(row: Row) -> str:
    """Return the idle shares of a step and what the generators waited for; empty if the row has none."""
    shares = {who: row.get(f"idle/{who}") for who in ("learner", "generators")}
    waits = generator_waits(row)
    text = ", ".join(f"{who} {share:.0%}" for who, share in shares.items() if share is not None)
    return f"{text} ({waits})" if text and waits else text


def generator_waits(row: Row) -> str:
    """Return what the generators waited for while they were idle, as in "60% for grading, 5% for leases"."""
    waits = ((row.get(key) or 0.0, shown) for key, shown in curves("Who waits").items())
    return ", ".join(f"{share:.0%} {shown.label}" for share, shown in waits if shown.least and share >= shown.least)


def who_waits(rows: Iterable[Row]) -> str:
    """Return a sentence on which side waited for the other in the steps of ``rows``, and why; empty if none did much.

    A rank of the learner that samples has no lease while it trains, which is no wait: such rows say nothing.
    """
    steps = [row for row in rows if is_step_row(row) and "idle/learner_used" not in row]
    keys = ("idle/learner", "idle/spare", "queue/run_ahead_held", "idle/grading", "idle/environment")
    means = {key: mean_of(steps, key, "time/step_s") or 0.0 for key in keys}
    learner, spare, is_held = means["idle/learner"], means["idle/spare"], means["queue/run_ahead_held"] > 0.5
    if max(learner, spare) <= MUCH_IDLE:
        return ""
    if learner <= MUCH_IDLE:
        count = steps[-1].get("generators") or 0
        needed = math.ceil((1 - spare) * count - 1e-9)
        fewer = f"; {needed} of {count} generators would do" if is_held and needed < count else ""
        return f"generators have {spare:.0%} to spare: the learner is the slower side{fewer}"
    waits = f"the learner is idle {learner:.0%} of the time and waits for generators"
    if causes := generator_waits(means):
        return f"{waits}, which wait {causes}"
    if spare > 2 * MUCH_IDLE:
        limits = "queue.run_ahead" if is_held else "queue.max_staleness or queue.max_bytes"
        return f"{waits}, which have {spare:.0%} to spare: {limits} holds them back"
    return f"{waits}: more of them make the run faster"


def is_step_row(row: Row) -> bool:
    """Return whether ``row`` of ``metrics.jsonl`` is about an optimizer step. All other rows are about evaluations."""
    return "version" in row and "tokens/trained" in row


def eval_accuracies(row: Row) -> dict[str, float]:
    """Return the accuracy of each evaluation set in ``row`` of ``metrics.jsonl``, by name; empty if it has none."""
    return {name: figures["accuracy"] for name, figures in eval_figures(row, "accuracy").items()}


def eval_lines(row: Row) -> list[str]:
    """Return one line of text with the accuracy for each evaluation set in ``row``, a row of ``metrics.jsonl``.

    ``step`` is the step that requested the evaluation. Training goes on meanwhile, so the line may come after those of
    later steps, and several versions of the weights may have answered: the line then names the first and the last.
    A line also gives the number of dataset rows without an answer if there are any, because they count as wrong.
    """
    lines: list[str] = []
    for dataset, figures in eval_figures(row, "accuracy").items():
        missing, rows, first, last = map(figures.get, ("unanswered", "rows", "version_min", "version_max"))
        versions = f" (versions {first} to {last})" if first != last else ""
        without = f" ({missing} of {rows} rows without an answer)" if missing else ""
        lines.append(f"eval {dataset} of step {row['step']}{versions}: accuracy {figures['accuracy']:.3f}{without}")
    return lines


def step_figures(row: Row) -> list[list[tuple[str, str]]]:
    """Return label and text of the figures that ``SHOWN`` names and the row has, in a list for each subject."""
    subjects: dict[str, list[tuple[str, str]]] = {}
    for key, shown in SHOWN.items():
        if not shown.figure or row.get(key) is None:
            continue
        figures = subjects.setdefault(SUBJECTS[key], [])
        text = shown.figure.format(number_text(row[key]))
        if shown.figure[0] != " ":
            label = shown.figure.partition(" {")[0]
            figures.append((label, text.removeprefix(label).lstrip()))
        elif figures:
            figures[-1] = (figures[-1][0], figures[-1][1] + text)
    subjects["idle"] = [("idle", idle)] if (idle := idle_text(row)) else []
    return [figures for figures in subjects.values() if figures]


def step_line(progress: RunProgress, *, has_all: bool = False) -> str:
    """Return one line of text about the newest step: reward, newest evaluation, seconds, who waits, and the ETA.

    With ``has_all`` it has all figures that ``SHOWN`` names instead.
    """
    row, eta = progress.step_row, "" if progress.eta_s is None else f"ETA {duration(progress.eta_s)}"
    parts, idle = [f"step {row['step']}/{progress.num_steps}"], idle_text(row).partition(" (")[0]
    if has_all:
        parts += [f"{label} {text}" for subject in step_figures(row) for label, text in subject]
    else:
        shown = {"reward/mean": "reward {}", "distill/kl": "KL to the teacher {}", "time/step_s": "{} s/step"}
        texts = [text.format(number_text(row[key])) for key, text in shown.items() if row.get(key) is not None]
        parts += [*texts[:1], progress.newest_eval, *texts[1:], idle and f"idle {idle}"]
    return " | ".join(filter(None, [*parts, eta]))


def duration(seconds: float) -> str:
    """Return a number of seconds as text, such as ``1h02m``, ``3m05s`` or ``12s``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def number_text(value: Any) -> str:
    """Return a figure of a row as short text; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
