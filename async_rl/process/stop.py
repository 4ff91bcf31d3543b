"""After SIGTERM or SIGINT, give a process time to save its work before it ends. The learner uses ``StopRequest``, and
servers without such work ``noted_signals``.

The first signal sets ``StopRequest.signum``. The process checks this number now and then, saves its work and ends. If
the process is still running ``grace_s`` seconds after the signal, or if a second signal arrives, it exits at once.

A separate thread handles the signals. So they take effect even if the main thread is in a call that does not return to
Python for minutes, such as a collective with a rank that hangs.
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
"""Seconds after the first signal in which further signals are ignored. They are copies of the first signal: Slurm,
torchrun and terminals send a signal to a process and to its parent, which sends it to the process again."""


class StopRequest:
    """Handles SIGTERM and SIGINT inside a ``with`` block, and says whether this process must save its work and end.

    Args:
        grace_s: seconds that the process gets to save its work and end. After that it exits at once.
        on_request: called once, in another thread, with the number of the first signal that this process receives.
        elsewhere: returns the number of a signal that another rank of the learner has received; 0 if there is none.
        exit_now: ends the process at once. Its argument is the exit code, 128 + the signal's number.
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
        self._is_saved = False
        self.signum = 0
        """The number of the signal after which this process must save its work and end; 0 if no signal has arrived."""
        self._asked_at = 0.0
        self._timer: threading.Timer | None = None

    def check(self) -> int:
        """Return the number of the signal that this process or another rank has received; 0 if there is none."""
        if not self.signum and (signum := self._elsewhere()):
            self.request(signum, " at another rank")
        return self.signum

    def request(self, signum: int, source: str = "") -> None:
        """Make this process save its work and end, as if it had received the signal ``signum``.

        Only the first request counts. ``source`` is text for the log, such as `` at another rank``.
        """
        if self.signum:
            return
        self.signum, self._asked_at = signum, time.monotonic()
        cause = f"not done after {self._grace_s:.0f} s (checkpoint.grace_s)"
        self._timer = threading.Timer(self._grace_s, self._end_now, [cause])
        self._timer.daemon = True
        self._timer.start()
        logger.warning(
            "%s%s: saving, then ending, within %.0f s (checkpoint.grace_s); a second signal ends it at once",
            signal.Signals(signum).name, source, self._grace_s,
        )  # fmt: skip

    def note_saved(self) -> None:
        """Record that the work is saved. If the process must then exit at once, its log says that nothing is lost."""
        self._is_saved = True

    def __enter__(self) -> Self:
        """Handle SIGTERM and SIGINT until the ``with`` block ends. Only the main thread may enter the block."""
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
        """Handle the signals, in a separate thread, until the ``with`` block ends.

        Python writes each signal's number as one byte to a socket, from which this method reads.
        """
        while received := self._reader.recv(1):
            signum = received[0]
            if signum not in SIGNALS or is_parent_gone():
                continue
            if not self.signum:
                self.request(signum)
                self._on_request(signum)
            elif time.monotonic() - self._asked_at >= SAME_REQUEST_S:
                self._end_now(f"a second signal, {signal.Signals(signum).name}")

    def _end_now(self, cause: str) -> None:
        rest = "everything is saved" if self._is_saved else "the same command resumes from the last whole checkpoint"
        logger.error("ending at once: %s; %s", cause, rest)
        self._exit_now(128 + self.signum)


def noted_signals() -> list[int]:
    """Return a list to which this process adds each SIGTERM and SIGINT from now on, in place of ending."""
    noted: list[int] = []
    for signum in SIGNALS:
        signal.signal(signum, lambda received, _frame: noted.append(received))
    return noted


def _leave_an_orphan(signum: int, _frame: FrameType | None) -> None:
    """Handle a signal: exit at once if the parent has died.

    In that case the queue server has ended, too, so the learner can't save its last step.
    """
    if is_parent_gone():
        raise SystemExit(128 + signum)
