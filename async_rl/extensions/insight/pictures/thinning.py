"""Thin the rows of a long ``metrics.jsonl`` out to what a picture can show, row by row.

``curve`` reads a run's rows through ``thinned``, so the memory for a drawing has a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from async_rl.run.records.step_log import Row

MAX_POINTS = 2000
"""Highest number of points of a curve, and of steps with evaluations. An even number."""


def thinned(rows: Iterable[Row], keys: Collection[str], *, max_points: int = MAX_POINTS) -> list[Row]:
    """Return the figures ``keys`` of ``rows``, in at most ``max_points`` + 1 rows, and as many of evaluations.

    If there are more rows of steps, neighbours are merged: a row then has the step of the last one, the mean of each
    figure, and the maximum of figures whose names end in ``/max``. The first step stays a row of its own, and the last
    row has the last step. Of steps with evaluations, the last of neighbours stays.

    Args:
        rows: in the order of the file. They are read once, and not kept.
        keys: the figures to keep, besides ``step`` and those that begin with ``eval/``.
        max_points: an even number.
    """
    steps, evaluations = _Thinned(max_points, _merged), _Thinned(max_points, lambda rows: rows[-1])
    newest: Row | None = None  # a step may have a row of evaluations for each data set
    for row in rows:
        figures = {key: row[key] for key in keys if row.get(key) is not None}
        if figures:
            steps.add({"step": row["step"]} | figures)
        evaluated = {key: value for key, value in row.items() if key.startswith("eval/")}
        if not evaluated:
            continue
        if newest is not None and newest["step"] != row["step"]:
            evaluations.add(newest)
            newest = None
        newest = (newest or {"step": row["step"]}) | evaluated
    if newest is not None:
        evaluations.add(newest)
    return steps.rows() + evaluations.rows()


class _Thinned:
    """Rows of which each but the first and the last stands for ``_each`` rows, which ``merge`` makes one of."""

    def __init__(self, max_points: int, merge: Callable[[Sequence[Row]], Row]) -> None:
        self._max_points, self._merge, self._each = max_points, merge, 1
        self._first: list[Row] = []
        self._points: list[Row] = []
        self._open: list[Row] = []

    def add(self, row: Row) -> None:
        if not self._first:
            self._first.append(row)
            return
        self._open.append(row)
        if len(self._open) < self._each:
            return
        self._points.append(self._merge(self._open))
        self._open = []
        if len(self._points) == self._max_points:
            self._points = [self._merge(self._points[at : at + 2]) for at in range(0, self._max_points, 2)]
            self._each *= 2

    def rows(self) -> list[Row]:
        return self._first + self._points + ([self._merge(self._open)] if self._open else [])


def _merged(rows: Sequence[Row]) -> Row:
    """Return one row for ``rows``, of which at least one is given."""
    if len(rows) == 1:
        return rows[0]
    merged: Row = {"step": rows[-1]["step"]}
    for key in dict.fromkeys(key for row in rows for key in row if key != "step"):
        values = [row[key] for row in rows if key in row]
        merged[key] = max(values) if key.endswith("/max") else sum(values) / len(values)
    return merged
