"""A file of rows by step, one JSON object a line: appended, read, and rewound to a checkpoint.

The learner writes ``metrics.jsonl`` and ``trained.jsonl`` with it; everyone reads them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_rl.run.directory import write_atomically

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class StepLog:
    """Appends rows, each flushed when ``write`` returns. One writer a file."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a last line that a dying process left half-written is cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; it must hold ``step``, and no number that is not finite."""
        if not isinstance(row.get("step"), int):
            raise ValueError(f"expected a row with an integer step, got {row.get('step')!r}")
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def rewind_to(self, step: int, *, is_gone: Callable[[Row], bool] = lambda row: False) -> int:
        """Move rows beyond ``step``, and those that ``is_gone``, to ``NAME.rolled_back-N.jsonl``.

        They tell of a history that was given up. A start without a checkpoint passes -1: no row survives.

        Returns:
            How many rows were moved.
        """
        gone: list[Row] = []
        kept: list[Row] = []
        for row in read_rows(self._path):
            (gone if row["step"] > step or is_gone(row) else kept).append(row)
        if not gone:
            return 0
        self._file.close()
        number = 1
        while (aside := self._path.with_name(f"{self._path.stem}.rolled_back-{number}.jsonl")).exists():
            number += 1
        write_atomically(aside, _lines(gone))
        write_atomically(self._path, _lines(kept))
        self._file = self._path.open("a", encoding="utf-8")
        logger.info("moved %d rows from after the checkpoint of step %d to %s", len(gone), step, aside.name)
        return len(gone)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none when there is no file. A torn last line is left out.

    Raises:
        ValueError: a line before the last is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    *lines, torn = text.split("\n")
    del torn  # empty when the file ends in a newline, else a row that was never finished
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:80]!r}") from error
        rows.append(row)
    return rows


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
