"""The parent watch: a pipe that closes when the parent dies, however it dies, and so ends the children.

``launch`` holds the write end and never writes. Every child inherits the read end, whose number is in
``ASYNC_RL_PARENT_WATCH_FD``; every role's command calls ``watch_parent`` first. When the parent dies, by SIGKILL too,
the kernel closes the pipe, and the child ends itself and its process group.
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

PARENT_WATCH_FD = "ASYNC_RL_PARENT_WATCH_FD"
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""


class ParentWatch:
    """The parent's side of the pipe: open as long as the parent lives."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec: only ``spawn`` hands one on

    def spawn(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start ``command`` in a process group of its own; it ends with this parent. Append its output to ``log``.

        Raises:
            OSError: the command can't be started.
        """
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                env={**environment, PARENT_WATCH_FD: str(self.read_fd)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(self.read_fd,),
                start_new_session=True,
            )

    def close(self) -> None:
        """Close the pipe. Children that still live end themselves."""
        os.close(self.read_fd)
        os.close(self._write_fd)


def watch_parent() -> bool:
    """End this process (and the group it leads) when the parent dies.

    Returns False, and does nothing, where the environment names no parent watch. Removes the variable, since this
    process's own children don't inherit the descriptor.
    """
    value = os.environ.pop(PARENT_WATCH_FD, None)
    if value is None:
        return False
    fd = int(value)
    os.set_inheritable(fd, False)
    threading.Thread(target=_wait_for_end, args=(fd,), name="parent-watch", daemon=True).start()
    return True


def _wait_for_end(fd: int) -> None:
    while os.read(fd, 1):
        pass
    sys.stderr.write("the parent process is gone: ending\n")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _kill_group_and_exit(grace_s=0.0)  # SIGTERM would end this process at once, and nobody would end the group
    # Not a daemon: the interpreter waits for it, so the group is killed even when the main thread ends in time.
    threading.Thread(target=_kill_group_and_exit, args=(GRACE_S,), name="parent-watch-end", daemon=False).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_group_and_exit(grace_s: float) -> None:
    """Wait for the main thread, at most ``grace_s``; then kill the group that this process leads, and exit."""
    threading.main_thread().join(grace_s)
    if os.getpgrp() == os.getpid():
        kill_group(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def exit_on_sigterm() -> None:
    """Make SIGTERM raise ``SystemExit`` in the main thread, so that ``finally`` blocks run; exit code 143."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def kill_group(leader: int, signum: int) -> None:
    """Send ``signum`` to the process group that ``leader`` leads; do nothing if the group is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signum)
