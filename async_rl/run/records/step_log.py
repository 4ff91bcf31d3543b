"""Write and read files of rows, one JSON object per line. Each row has the number of its optimizer step (``step``).

The learner writes ``metrics.jsonl`` and ``trained.jsonl`` in this form. When it resumes from a checkpoint, it removes
the rows of later steps. Other processes read the files, also while they grow.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rl.run.directory import appended_lines, is_figure, unused, write_atomically

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_NEWEST_BYTES = 1 << 18
"""How much of the end of a file ``newest_metrics`` reads."""


class StepLog:
    """Appends rows to a file. Each row is in the file when ``write`` returns. A file must have only one writer.

    ``rewind_to`` replaces the file by a new one. An older learner that still has the old file open can add no row to
    the new file.
    """

    def __init__(self, path: Path) -> None:
        """Open the file for appending, and remove an incomplete last line, which a process may leave when it dies."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row to the file. It must have an integer ``step``, and its numbers must be finite.

        Raises:
            ValueError: a number is not finite.
        """
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def rewind_to(self, step: int, *, is_gone: Callable[[Row], bool] = lambda row: False) -> int:
        """Move the rows of the steps after ``step`` to a new file ``NAME.rolled_back-N.jsonl``.

        The learner calls this when it resumes from the checkpoint of ``step``, because it will train the later steps
        again. Without a checkpoint, ``step`` is -1 and all rows are moved.

        Args:
            is_gone: returns True for an earlier row that must be moved, too.

        Returns:
            The number of rows that were moved.
        """
        gone: list[Row] = []
        kept: list[Row] = []
        damaged: dict[int, str] = {}
        for row in _rows(self._path, damaged):
            (gone if row["step"] > step or is_gone(row) else kept).append(row)
        self._file.close()
        if gone:
            aside = self._write_aside("rolled_back", _lines(gone))
            where = f"after the checkpoint of step {step}" if step >= 0 else "of an earlier start without a checkpoint"
            logger.info("moved %d rows %s to %s", len(gone), where, aside.name)
        if damaged:
            aside = self._write_aside("damaged", "".join(f"{line}\n" for line in damaged.values()))
            logger.warning("%s; moved to %s", _complaint(self._path, damaged), aside.name)
        write_atomically(self._path, _lines(kept))
        self._file = self._path.open("a", encoding="utf-8")
        return len(gone)

    def _write_aside(self, why: str, text: str) -> Path:
        """Write ``text`` to the next file ``NAME.WHY-N.jsonl`` that does not exist yet, and return its path."""
        aside = unused(self._path.with_name(f"{self._path.stem}.{why}"), ".jsonl")
        write_atomically(aside, text)
        return aside

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StepLogTail:
    """Reads the rows that another process appends to ``metrics.jsonl``, or replaces by a shorter file.

    No row is kept, so a long run needs no more memory than a short one.
    """

    def __init__(self, path: Path) -> None:
        """Find the end of the existing rows. ``poll`` returns only later rows."""
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        if path.exists():
            self._inode = path.stat().st_ino
            self._offset = self._end()
        self._history_bytes = self._offset

    @property
    def history(self) -> Iterator[Row]:
        """The rows that the file had when this object was constructed. Each use reads them again, one by one."""
        if not self._history_bytes:
            return
        with self._path.open("rb") as file:
            while file.tell() < self._history_bytes:
                row = parse_row(file.readline().decode(errors="replace"))
                if row is not None and is_metrics_row(row):
                    yield row

    def poll(self) -> list[Row]:
        """Return the rows that the other process has written since the last call."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return []
        replaced = self._inode is not None and inode != self._inode
        self._inode = inode
        if replaced:  # by a file with only its first rows, which were returned before
            self._offset = self._end()
            return []
        lines, self._offset = appended_lines(self._path, self._offset)
        return _metrics_rows(lines)

    def _end(self) -> int:
        """Return the length of the file in bytes, without an incomplete last line."""
        with self._path.open("rb") as file:
            return sum(len(line) for line in file if line.endswith(b"\n"))


_said: set[tuple[Path, tuple[int, ...]]] = set()


def read_rows(path: Path, *, is_whole: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return all rows of a file, without an incomplete last line; an empty list if the file does not exist.

    Rows that can't be read, because the file was damaged, are left out. A warning says so, once for each of them.

    Args:
        is_whole: returns False for a row whose content is damaged, too.
    """
    return list(iter_rows(path, is_whole=is_whole))


def iter_rows(path: Path, *, is_whole: Callable[[Row], bool] = lambda row: True) -> Iterator[Row]:
    """Yield the rows of a file one by one, as ``read_rows`` does. A file of a long run needs much memory as a whole."""
    damaged: dict[int, str] = {}
    yield from _rows(path, damaged, is_whole)
    if damaged and (found := (path, tuple(damaged))) not in _said:
        _said.add(found)
        logger.warning("%s; left out", _complaint(path, damaged))


def iter_metrics(path: Path) -> Iterator[Row]:
    """Yield the rows of ``metrics.jsonl`` one by one, as ``read_metrics`` does."""
    return iter_rows(path, is_whole=is_metrics_row)


def newest_metrics(path: Path) -> list[Row]:
    """Return the last rows of ``metrics.jsonl``, some dozens, at a cost that does not grow with the file."""
    if not path.exists():
        return []
    lines, _ = appended_lines(path, max(0, path.stat().st_size - _NEWEST_BYTES))
    return _metrics_rows(lines)


def last_step(path: Path) -> int:
    """Return the highest step in ``metrics.jsonl``; 0 if there is none."""
    return max((row["step"] for row in iter_metrics(path)), default=0)


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of ``metrics.jsonl``, as ``read_rows`` does. Every figure is a number, or None."""
    return read_rows(path, is_whole=is_metrics_row)


def is_metrics_row(row: Row, *, needed: Collection[str] = ("time_s",)) -> bool:
    """Return whether the figures of a row of ``metrics.jsonl`` can be computed with. A damaged file may have others."""
    figures = all(value is None or is_figure(value) for value in row.values())
    return figures and row["step"] >= 0 and ("version" not in row or all(is_figure(row.get(key)) for key in needed))


def mean_of(rows: Iterable[Row], key: str, weight: str | None) -> float | None:
    """Return the mean of ``key`` over the rows that have it, weighted by the key ``weight`` if given. None if none."""
    pairs = [(row[key], 1.0 if weight is None else row.get(weight) or 0.0) for row in rows if row.get(key) is not None]
    total = sum(share for _, share in pairs)
    return sum(value * share for value, share in pairs) / total if total > 0 else None


def eval_figures(row: Mapping[str, Any], needed: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the figures of each evaluation set in a row of ``metrics.jsonl``, by the set's name; empty if it has none.

    Figures that are None are left out. If ``needed`` is given, so are sets without the figure of that name.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in row.items():
        if key.startswith("eval/") and value is not None:
            dataset, _, figure = key.removeprefix("eval/").rpartition("/")
            found.setdefault(dataset, {})[figure] = value
    return {dataset: figures for dataset, figures in found.items() if needed is None or needed in figures}


def _rows(path: Path, damaged: dict[int, str], is_whole: Callable[[Row], bool] = lambda row: True) -> Iterator[Row]:
    """Yield the rows of a file. Put its lines that are none into ``damaged``, by their numbers, which begin with 1."""
    for number, line in _numbered_lines(path):
        if (row := parse_row(line)) is None or not is_whole(row):
            damaged[number] = line
        else:
            yield row


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, which begin with 1. None if the file does not exist."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):  # else a row that was never completed
                yield number, line[:-1]


def _metrics_rows(lines: Iterable[str]) -> list[Row]:
    return [row for row in map(parse_row, lines) if row is not None and is_metrics_row(row)]


def parse_row(line: str) -> Row | None:
    """Return the row in a line. None if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _complaint(path: Path, damaged: Mapping[int, str]) -> str:
    number, line = next(iter(damaged.items()))
    return (
        f"{path}, line {number}{f' and {len(damaged) - 1} more' if len(damaged) > 1 else ''}: expected a JSON object "
        f"with a step, got {line[:80]!r}"
    )


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
