"""Convert rows of a data set as the Hugging Face hub has them, and write them to a file, for the recipes' scripts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rl.data.files import Source
from async_rl.errors import DataError

Row = Mapping[str, Any]


def converted(source: str, convert: Callable[[Row], Row]) -> Iterator[Row]:
    """Yield the rows of ``source``, in any form of docs/data.md, after ``convert``.

    Raises:
        DataError: the source can't be read, or a row has other columns.
    """
    for where, raw in Source(source).records():
        if isinstance(raw, DataError):
            raise raw
        try:
            yield convert(raw)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            cause = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{where}: {cause}; expected rows as the hub has them, choose another file") from error


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write the rows to ``path``, completely or not at all. Return their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)
    return len(lines)


def report(path: Path, source: str, rows: Iterable[Row]) -> None:
    """Write the rows of ``source`` to ``path`` with a line about each on the terminal."""
    print(f"reading {source}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{path}: {write_rows(path, rows)} rows", flush=True)


def or_exit(main: Callable[[], None]) -> None:
    """Run ``main``. If the data is bad, print why, and exit with 2."""
    try:
        main()
    except DataError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
