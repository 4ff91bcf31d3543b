"""Thin the rows of a long ``metrics.jsonl`` out to what a picture can show, row by row.

``curve`` reads a run's rows through ``thinned``, so the memory for a drawing has a limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from async_rl.run.records.step_log import Row

MAX_POINTS = 2000
"""Highest number of points of a curve, and of steps with evaluations. An even number."""


def thinned(rows: Iterable[Row], keys: Collection[str], *, max_points: int = MAX_POINTS) -> list[Row]:
    """Return the figures ``keys`` of ``rows``, in at most ``max_points`` + 1 rows, and as many of evaluations.

    If there are more rows of steps, neighbours are merged: a row then has the step of the last one, the mean of each
    figure, and the maximum of figures whose names end in ``/max``. The first step stays a row of its own, and the last
    row has the last step. If there are more steps with evaluations, some in between are left out.

    Args:
        rows: in the order of the file. They are read once, and not kept.
        keys: the figures to keep, besides ``step`` and those that begin with ``eval/``.
        max_points: an even number.
    """
    steps, evaluations = _Steps(max_points), _Evaluations(max_points)
    for row in rows:
        figures = {key: row[key] for key in keys if row.get(key) is not None}
        if figures:
            steps.add({"step": row["step"]} | figures)
        evaluated = {key: value for key, value in row.items() if key.startswith("eval/")}
        if evaluated:
            evaluations.add({"step": row["step"]} | evaluated)
    return steps.rows() + evaluations.rows()


class _Steps:
    """Rows of steps, of which each but the first and the last stands for ``_each`` steps."""

    def __init__(self, max_points: int) -> None:
        self._max_points, self._each = max_points, 1
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
        self._points.append(_merged(self._open))
        self._open = []
        if len(self._points) == self._max_points:
            self._points = [_merged(self._points[at : at + 2]) for at in range(0, self._max_points, 2)]
            self._each *= 2

    def rows(self) -> list[Row]:
        return self._first + self._points + ([_merged(self._open)] if self._open else [])


class _Evaluations:
    """Rows of evaluations: the first, the newest, and every ``_each``-th in between. A step has one row."""

    def __init__(self, max_points: int) -> None:
        self._max_points, self._each, self._num_steps = max_points, 1, 0
        self._kept: list[Row] = []
        self._newest: Row | None = None

    def add(self, row: Row) -> None:
        if self._newest is not None and self._newest["step"] == row["step"]:  # of another data set
            self._newest |= row
            return
        if self._newest is not None:
            if self._num_steps % self._each == 0:
                self._kept.append(self._newest)
            self._num_steps += 1
        self._newest = row
        if len(self._kept) == self._max_points:
            self._kept = self._kept[::2]
            self._each *= 2

    def rows(self) -> list[Row]:
        return self._kept + ([] if self._newest is None else [self._newest])


def _merged(rows: Sequence[Row]) -> Row:
    """Return one row for ``rows``, of which at least one is given."""
    if len(rows) == 1:
        return rows[0]
    merged: Row = {"step": rows[-1]["step"]}
    for key in dict.fromkeys(key for row in rows for key in row if key != "step"):
        values = [row[key] for row in rows if key in row]
        merged[key] = max(values) if key.endswith("/max") else sum(values) / len(values)
    return merged
