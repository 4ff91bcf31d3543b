"""The files that the queue server writes into the run directory: ``queue.json`` and ``ledger.json``.

``queue.json`` has the server's address. ``ledger.json`` has the queue's counts of groups, rollouts and tokens. Readers
see a whole old file or a whole new file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from async_rl.net.address import check_address
from async_rl.run.directory import write_atomically

LEDGER_EVERY_S = 1.0
_LEDGER_GAP_S = 0.25
"""Shortest time between two writes of ``ledger.json``, in seconds, if the learner makes steps in between."""


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The content of ``queue.json``: the run id, process id and address of a run's queue server.

    ``run_id`` is empty until the first learner attaches, except if the server was started with ``--run-id``.
    """

    run_id: str
    pid: int
    address: str


def read_record(run_dir: Path) -> QueueRecord | None:
    """Return the content of ``queue.json`` in ``run_dir``; None if the file does not exist or is malformed."""
    try:
        return msgspec.json.decode((run_dir / "queue.json").read_bytes(), type=QueueRecord)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def last_port(run_dir: Path, run_id: str) -> int | None:
    """Return the port of the run's last queue server, from ``queue.json``; None if the file has no such server.

    A restarted server uses the same port, because generators still connect to it. ``run_id`` is the id of the run. If
    it is empty, the server of any run counts.
    """
    record = read_record(run_dir)
    if record is None or (run_id and record.run_id != run_id):
        return None
    return check_address(record.address)[1]


def _write_json(path: Path, plain: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(plain, indent=1) + "\n")


class BackgroundFile:
    """Writes a JSON file in a separate thread, so that a slow disk does not block the queue server.

    If a write fails, the next call of ``write`` or ``close`` raises its OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.name)
        self._writing: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last write is still running."""
        return self._writing is not None and not self._writing.done()

    def write(self, plain: Mapping[str, Any]) -> None:
        """Start to write ``plain`` to the file as JSON, and return at once. Do not call this while ``is_busy``."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        self._writing = self._thread.submit(_write_json, self._path, plain)

    def close(self) -> None:
        """Wait until the last write is done, and end the thread."""
        self._thread.shutdown()
        if self._writing is not None:
            self._writing.result()


class RunFiles:
    """Keeps ``queue.json`` and ``ledger.json`` of the queue server at ``address`` up to date."""

    def __init__(self, run_dir: Path, address: str) -> None:
        self._run_dir, self._address = run_dir, address
        self._ledger = BackgroundFile(run_dir / "ledger.json")
        self._recorded_run_id: str | None = None
        self._written_revision, self._written_at, self._written_step = -1, 0.0, -1

    def record(self, run_id: str) -> None:
        """Write ``queue.json`` with ``run_id``, the id of this process and the server's address."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        _write_json(self._run_dir / "queue.json", asdict(QueueRecord(run_id, os.getpid(), self._address)))
        self._recorded_run_id = run_id

    def write(
        self, run_id: str, ledger: Callable[[], Mapping[str, Any]], now: float, *, revision: int, step: int
    ) -> None:
        """Write ``queue.json`` and ``ledger.json`` if their content has changed since the last call.

        ``ledger.json`` is not written now if its last write is too recent or still running. A later call writes it.

        Args:
            run_id: the id of the run that the server serves.
            ledger: returns the content of ``ledger.json``.
            now: the current time in seconds.
            revision: a number that grows with every change of the ledger.
            step: the learner's step. After a new step the ledger is written sooner.
        """
        if self._recorded_run_id != run_id:
            self.record(run_id)
        is_due = now - self._written_at >= (_LEDGER_GAP_S if step != self._written_step else LEDGER_EVERY_S)
        if self._written_revision == revision or not is_due or self._ledger.is_busy:
            return
        self._written_at, self._written_step = now, step
        self._ledger.write({"run_id": run_id, **ledger()})
        self._written_revision = revision

    def write_last(self, run_id: str, ledger: Mapping[str, Any]) -> None:
        """Write ``ledger.json`` for the last time, at the end of the server. Wait for an unfinished write before."""
        self._ledger.close()
        _write_json(self._run_dir / "ledger.json", {"run_id": run_id, **ledger})
