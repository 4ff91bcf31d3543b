"""Two tools for the background threads here: a signal that can be polled, and a thread that runs jobs."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable


class Wake:
    """A flag with a file descriptor that is readable while the flag is set. Any thread may set, clear or wait."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        # A full pipe means that the flag is set; a closed one that nobody waits for it.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self, timeout_s: float) -> bool:
        """Return whether it was set within ``timeout_s``. Does not clear it."""
        return bool(select.select([self._reader], [], [], timeout_s)[0])


class JobThread:
    """A daemon thread that runs jobs one after the other. Jobs report their own results and raise nothing."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, last: Callable[[], None], timeout_s: float) -> bool:
        """Run the jobs that are left, then ``last``, and end. Returns whether that took at most ``timeout_s``."""
        self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
