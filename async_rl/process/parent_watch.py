"""The lifeline: a pipe whose end tells a child that its parent is gone, however the parent went.

``launch`` holds the write end and never writes. Every child inherits the read end, its number in
``ASYNC_RL_LIFELINE_FD``; ``watch_lifeline`` is called first thing by every role's command. When the parent dies,
SIGKILL included, the kernel closes the pipe, and the child ends itself and its process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

LIFELINE_FD = "ASYNC_RL_LIFELINE_FD"
GRACE_S = 5.0
"""Between the polite signal and the final one."""


class Lifeline:
    """The parent's side: open as long as the parent lives."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec: only ``spawn`` hands one on

    def spawn(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start ``command`` in a process group of its own, output appended to ``log``, tied to this lifeline.

        Raises:
            OSError: it can't be started.
        """
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                env={**environment, LIFELINE_FD: str(self.read_fd)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(self.read_fd,),
                start_new_session=True,
            )

    def close(self) -> None:
        """Let go: children that still live end themselves."""
        os.close(self.read_fd)
        os.close(self._write_fd)


def watch_lifeline() -> bool:
    """End this process (and its group, if it leads one) when the parent named in the environment is gone.

    Without a lifeline in the environment it does nothing, and says so with False. The variable is taken out, for the
    descriptor is not inherited by this process's own children.
    """
    value = os.environ.pop(LIFELINE_FD, None)
    if value is None:
        return False
    fd = int(value)
    os.set_inheritable(fd, False)
    threading.Thread(target=_wait_for_end, args=(fd,), name="lifeline", daemon=True).start()
    return True


def _wait_for_end(fd: int) -> None:
    while os.read(fd, 1):
        pass
    sys.stderr.write("the process that started this one is gone: ending\n")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _sweep(grace_s=0.0)  # SIGTERM would end this process at once, and leave nobody to sweep the group
    # Not a daemon: the interpreter waits for it, so the group is swept even when the main thread ends in time.
    threading.Thread(target=_sweep, args=(GRACE_S,), name="lifeline-sweep", daemon=False).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _sweep(grace_s: float) -> None:
    """End the process, and its group if it leads one, when the main thread is done or ``grace_s`` is over."""
    threading.main_thread().join(grace_s)
    if os.getpgrp() == os.getpid():
        kill_group(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the main thread (``finally`` blocks run) with exit code 143; roles may refine this."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def kill_group(leader: int, signum: int) -> None:
    """Send ``signum`` to the process group that ``leader`` leads; one that is gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signum)
