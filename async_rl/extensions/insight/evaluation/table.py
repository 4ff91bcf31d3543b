"""Makes tables: of the evaluations of several models, and of any cells."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("best_of_n", "best@{n}", ".3f"),
    ("majority_at_n", "maj@{n}", ".3f"),
    ("score", "score", ".3g"),
    ("reward", "reward", ".3g"),
    ("turns", "turns", ".1f"),
    ("length_mean", "tokens", ".1f"),
    ("truncated", "cut", ".1%"),
)
"""The columns of a table after accuracy and pass@k. Each has the key of a figure, a heading and a number format."""


def eval_table(models: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of a table: a line of headings, then one line for each of ``models``, name -> figures.

    The figures have the keys of ``metric_table.EVAL_FIGURES``. Columns without any figure are left out.
    """
    of_all = list(models.values())
    columns = [
        ("model", list(models)),
        ("accuracy", [cell(f.get("accuracy"), ".3f", f.get("accuracy_se"), error_form=".3f") for f in of_all]),
        *(
            (heading, [cell(f[key], form) if key in f else "" for f in of_all])
            for key, heading, form in _chosen(of_all)
        ),
        ("unanswered", [_unanswered(figures) for figures in of_all]),
    ]
    shown = [(heading, cells) for heading, cells in columns if any(cells)]
    return aligned([[heading for heading, _ in shown], *([cells[i] for _, cells in shown] for i in range(len(of_all)))])


def aligned(rows: Sequence[Sequence[str]], *, num_labels: int = 1) -> list[str]:
    """Return the lines of a table: the first ``num_labels`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < num_labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def cell(value: float | None, form: str, error: float | None = None, *, error_form: str = ".2g") -> str:
    """Return a number in the format ``form``, with its standard error if that is known; ``-`` for None."""
    shown = "-" if value is None else format(value, form)
    return shown if value is None or error is None else f"{shown} ± {error:{error_form}}"


def _chosen(of_all: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """Choose the table's columns to the right of the accuracy. Return each column's key, heading and number format.

    In headings such as ``best@{n}``, ``{n}`` becomes the number of answers per row, which all evaluations share.
    """
    number = int(of_all[0].get("samples", 1))
    keys = {key for figures in of_all for key in figures}
    tries = sorted(int(key.removeprefix("pass_at_")) for key in keys if re.fullmatch(r"pass_at_\d+", key))
    # pass@1 equals the accuracy unless an answer is partly right.
    if all(figures.get("pass_at_1") == figures.get("accuracy") for figures in of_all):
        tries = [k for k in tries if k > 1]
    passes = [(f"pass_at_{k}", f"pass@{k}", ".3f") for k in tries]
    if number > 1 and number not in tries:
        passes.append(("pass_at_k", f"pass@{number}", ".3f"))
    # For the same reason the best answer's accuracy equals pass@n.
    same_best = all(figures.get("best_of_n") == figures.get("pass_at_k") for figures in of_all)
    keys -= {"best_of_n"} if same_best else set()
    chosen = [column for column in (*passes, *_COLUMNS) if column[0] in keys]
    return [(key, heading.format(n=number), form) for key, heading, form in chosen]


def _unanswered(figures: Mapping[str, float]) -> str:
    return str(int(figures["unanswered"])) if figures.get("unanswered") else ""
