"""Whether a run of the staleness study is named by a note before it breaks (``async_rl.run.figures.health``), and which
notes are false.

Accuracy is that of a step's sampled answers, a mean of three steps. A run *breaks* if it falls below a third of its
best, and the fall begins at the last step before that at which it still had two thirds. A run is *healthy* if its
accuracy at the end is within a twentieth of the best run's of its task and seed. The others are worse than the best and
do not break; a note about one of them is neither right nor wrong here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

from async_rl.run.records.step_log import Row
from benchmarks.staleness_grid import Cell

SMOOTH, BREAK, FALL, NEAR = 3, 1 / 3, 2 / 3, 0.95


def fall_of(sampled: Sequence[float]) -> int | None:
    """Return the step, from 1 on, at which the fall of a run that breaks begins; None if it does not break."""
    means = [mean(sampled[max(0, at + 1 - SMOOTH) : at + 1]) for at in range(len(sampled))]
    best, fall = 0.0, 0
    for step, accuracy in enumerate(means, start=1):
        best = max(best, accuracy)
        if accuracy >= FALL * best:
            fall = step + 1
        if accuracy < BREAK * best:
            return fall
    return None


def notes_report(rows: Mapping[Cell, Row]) -> str:
    """Return a table of the runs that break, and a line on the notes of healthy ones."""
    best = {(c.task, c.seed): max(r["accuracy"] for o, r in rows.items() if (o.task, o.seed) == (c.task, c.seed))
            for c in rows}  # fmt: skip
    falls = {cell: fall_of(row["sampled"]) for cell, row in rows.items()}
    healthy = [
        cell for cell, row in rows.items()
        if falls[cell] is None and row["accuracy"] >= NEAR * best[cell.task, cell.seed]
    ]  # fmt: skip
    lines, leads = ["| run | the fall begins | first note | steps before it |", "|---|---|---|---|"], list[int]()
    for cell, fall in sorted(falls.items()):
        if fall is None:
            continue
        cause, step = min(rows[cell]["notes"], key=lambda note: note[1], default=("none", len(rows[cell]["sampled"])))
        leads.append(fall - step)
        lines.append(f"| {cell.name} | {fall} | {cause}, {step} | {fall - step} |")
    named = sum(lead > 0 for lead in leads)
    noted = [cell.name for cell in healthy if rows[cell]["notes"]]
    ahead = f", a median of {median(leads):g} steps before" if leads else ""
    return "\n".join(
        [*lines, "", f"{named} of {len(leads)} breaks are named before they begin{ahead}.",
         f"{len(noted)} of {len(healthy)} healthy runs have a note: {', '.join(noted) or 'none'}."]
    )  # fmt: skip
