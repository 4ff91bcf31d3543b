"""A flag with which one thread wakes another that waits for it in a poller."""

from __future__ import annotations

import contextlib
import socket

from async_rl.net.streams import is_readable


class Wake:
    """A flag with which one thread wakes another. Its file descriptor is readable while the flag is set."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        # If the pipe is full, the flag is set. If it is closed, no thread waits for it.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set. Return whether that happened within ``timeout_s``. The flag stays set."""
        return is_readable(self._reader.fileno(), timeout_s)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
