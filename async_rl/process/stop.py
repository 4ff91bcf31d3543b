"""On SIGTERM or SIGINT, give a process time to save its work before it ends. The learner uses this module.

The first signal sets ``StopRequest.signum``. The process checks it and ends when its work is saved. If the process is
still running ``grace_s`` seconds later, or a second signal arrives, it exits at once.

A thread reads the signals from a pipe. They take effect at once even while the main thread is in a call that does not
return to Python for minutes, such as a collective with a rank that hangs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from async_rl.process.child import is_parent_gone

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_S = 2.0
"""A second signal within this many seconds is ignored as a copy of the first. Slurm, torchrun and terminals signal a
process and its parent, which passes the signal on."""


class StopRequest:
    """Handles SIGTERM and SIGINT inside a ``with`` block, and says whether this process must save its work and end.

    Args:
        grace_s: seconds that the process has to save and end. After that it exits at once.
        on_request: called once, in another thread, with the first signal that this process received.
        elsewhere: returns the signal that another process of the same role received, 0 if there is none.
        exit_now: called to end the process at once. Its argument is the exit code, 128 + signal.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        on_request: Callable[[int], None] = lambda signum: None,
        elsewhere: Callable[[], int] = lambda: 0,
        exit_now: Callable[[int], None] = os._exit,
    ) -> None:
        self._grace_s, self._on_request, self._elsewhere, self._exit_now = grace_s, on_request, elsewhere, exit_now
        self._signum, self._is_saved = 0, False
        self._asked_at = 0.0
        self._timer: threading.Timer | None = None

    @property
    def signum(self) -> int:
        """The number of the signal that asked this process to end; 0 if there was none."""
        return self._signum

    def check(self) -> int:
        """Return ``signum``, after asking whether another process received a signal."""
        if not self._signum and (signum := self._elsewhere()):
            self.request(signum, " at another rank")
        return self._signum

    def request(self, signum: int, source: str = "") -> None:
        """Ask this process to save and end, as if it had received the signal ``signum``. Later requests are ignored.

        ``source`` is text for the log that says which process received the signal.
        """
        if self._signum:
            return
        self._signum, self._asked_at = signum, time.monotonic()
        cause = f"not done after {self._grace_s:.0f} s (checkpoint.grace_s)"
        self._timer = threading.Timer(self._grace_s, self._end_now, [cause])
        self._timer.daemon = True
        self._timer.start()
        logger.warning(
            "%s%s: saving, then ending, within %.0f s (checkpoint.grace_s); a second signal ends it at once",
            signal.Signals(signum).name, source, self._grace_s,
        )  # fmt: skip

    def note_saved(self) -> None:
        """Record that everything is saved, so that an exit at once would lose nothing. Only the log message changes."""
        self._is_saved = True

    def __enter__(self) -> Self:
        """Replace the handlers of SIGTERM and SIGINT until the block ends. Only the main thread may do this."""
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        self._handlers = {signum: signal.signal(signum, _leave_an_orphan) for signum in SIGNALS}
        self._wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        if self._timer is not None:
            self._timer.cancel()

    def _read(self) -> None:
        """Handle each signal until the pipe is closed. Python writes each signal's number to the pipe as one byte."""
        while received := self._reader.recv(1):
            signum = received[0]
            if signum not in SIGNALS or is_parent_gone():
                continue
            if not self._signum:
                self.request(signum)
                self._on_request(signum)
            elif time.monotonic() - self._asked_at >= SAME_REQUEST_S:
                self._end_now(f"a second signal, {signal.Signals(signum).name}")

    def _end_now(self, cause: str) -> None:
        rest = "everything is saved" if self._is_saved else "the same command resumes from the last whole checkpoint"
        logger.error("ending at once: %s; %s", cause, rest)
        self._exit_now(128 + self._signum)


def _leave_an_orphan(signum: int, _frame: FrameType | None) -> None:
    """Signal handler: exit at once if the parent has died. Nothing can be saved, as the queue server has ended, too."""
    if is_parent_gone():
        raise SystemExit(128 + signum)
