"""The queue's two small files in the run directory: ``queue.json`` and ``ledger.json``, rewritten atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """Where a run's queue server is. ``run_id`` is empty until its first learner attached, unless it was given."""

    run_id: str
    pid: int
    address: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_record(run_dir: Path) -> QueueRecord | None:
    """The recorded server; None if none is recorded, or the file is not one of ours."""
    try:
        plain = json.loads((run_dir / "queue.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    match plain:
        case {"run_id": str(run_id), "pid": int(pid), "address": str(address)}:
            return QueueRecord(run_id, pid, address)
        case _:
            return None


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """The file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


class BackgroundFile:
    """A JSON file that a thread rewrites: to replace one may wait for the disk, longer than a group takes.

    Raises (``write`` and ``close``): OSError, what went wrong with the last writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.name)
        self._writing: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last writing goes on."""
        return self._writing is not None and not self._writing.done()

    def write(self, plain: Mapping[str, Any]) -> None:
        """Begin to write; not to be called while it is busy."""
        if self._writing is not None:
            self._writing.result()
        self._writing = self._thread.submit(write_json, self._path, plain)

    def close(self) -> None:
        """Returns when the last writing is done."""
        self._thread.shutdown()
        if self._writing is not None:
            self._writing.result()
