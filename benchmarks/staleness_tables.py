"""The tables of the staleness study: each arm beside the first of its question, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise, product
from statistics import mean, stdev

from async_rl.run.records.step_log import Row
from benchmarks.staleness_grid import Cell, Question

_T = {
    1: (12.706, 1.376),
    2: (4.303, 1.061),
    3: (3.182, 0.978),
    4: (2.776, 0.941),
    5: (2.571, 0.920),
    6: (2.447, 0.906),
    7: (2.365, 0.896),
}
"""Student's t by degrees of freedom: two-sided 95 %, and one-sided 80 %."""
_HEADS = (
    "task", "rate", "arm", "runs", "age", "late", "ESS", "KL", "accuracy", "area", "difference", "could see", "verdict",
)  # fmt: skip


def report(questions: Sequence[Question], rows: Mapping[Cell, Row]) -> str:
    """Return one Markdown table for each question of which there are runs; those of one title share it.

    *accuracy* is that of the answers at a run's end, *area* the mean accuracy under its curve, *late* the share of
    groups and tokens that were too old to train on. *difference* is the accuracy less the first arm's at the same rate
    and seed, with the 95 % interval of Student's t over seeds. Four of five such comparisons would find a difference as
    large as *could see*. If the interval has 0, the arms are not told apart, which does not mean that they are equal.
    """
    heads = f"| {' | '.join(_HEADS)} |\n{'|---' * len(_HEADS)}|"
    tables = [
        "\n".join([f"### {title}\n", heads, *lines])
        for title, same in groupby(questions, key=lambda question: question.title)
        if (lines := [line for question in same for line in _lines(question, rows)])
    ]
    return "\n\n".join(tables)


def _lines(question: Question, rows: Mapping[Cell, Row]) -> list[str]:
    lines: list[str] = []
    for task, rate in product(question.tasks, question.rates):
        by_arm = {
            arm: {s: rows[cell] for s in range(question.seeds) if (cell := Cell(task, arm, rate, s)) in rows}
            for arm in question.arms
        }
        first = by_arm[question.arms[0]]
        lines += [_line(task, rate, arm, found, first) for arm, found in by_arm.items() if found]
    return lines


def _line(task: str, rate: float, arm: str, found: Mapping[int, Row], first: Mapping[int, Row]) -> str:
    runs = list(found.values())
    differences = [row["accuracy"] - first[seed]["accuracy"] for seed, row in found.items() if seed in first]
    cells = [
        task, f"x{rate:g}", arm, str(len(runs)), _figure(runs, "staleness/mean", ".3g"),
        f"{mean(map(late_share, runs)):.1%}", _figure(runs, "ratio/ess", ".3f"), _figure(runs, "ratio/kl", ".2g"),
        f"{mean(row['accuracy'] for row in runs):.3f}", f"{mean(map(area, runs)):.3f}",
        *(("", "", "") if found is first else compared(differences)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _figure(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows if key in row]
    return format(mean(values), form) if values else "-"


def late_share(row: Row) -> float:
    """Return the share of a run's tokens that were masked, and of its groups that were dropped, for their age."""
    groups, tokens = row["groups"], row["tokens"]
    late = sum(groups["dropped"].get(cause, 0) for cause in ("stale", "cancelled", "too_slow"))
    masked = tokens["masked"].get("stale", 0)
    return late / max(1, groups["issued"]) + masked / max(1, masked + tokens["trained"])


def area(row: Row) -> float:
    """Return the mean accuracy under the line through a run's evaluations."""
    points = row["evals"]
    trapezoids = ((b - a) * (left + right) / 2 for (a, left), (b, right) in pairwise(points))
    return sum(trapezoids) / (points[-1][0] - points[0][0])


def compared(differences: Sequence[float]) -> tuple[str, str, str]:
    """Return the mean difference with its interval, the smallest that could have been seen, and what it says."""
    num = len(differences)
    if num < 2:
        return f"{mean(differences):+.3f}" if differences else "", "", "too few runs"
    error = stdev(differences) / math.sqrt(num)
    t_interval, t_power = _T[num - 1]
    low, high = mean(differences) - t_interval * error, mean(differences) + t_interval * error
    verdict = "better" if low > 0 else "worse" if high < 0 else "not told apart"
    return f"{mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]", f"{(t_interval + t_power) * error:.3f}", verdict
