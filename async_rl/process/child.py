"""Start processes of a run, end them with their parent, and let them reuse freed memory.

``module_command`` and ``package_environment`` start a module of the same copy of this package.

``ParentWatch`` is a pipe that closes when the parent dies. ``launch`` holds the write end and never writes. Every child
inherits the read end, whose number is in ``ASYNC_RL_PARENT_WATCH_FD``; every role's command calls ``watch_parent``
first. When the parent dies, by SIGKILL too, the kernel closes the pipe, and the child ends itself and its process
group.
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

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
"""The directory that holds the package ``async_rl``."""

PARENT_WATCH_FD = "ASYNC_RL_PARENT_WATCH_FD"
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20

_parent_is_gone = threading.Event()


def module_command(module: str, *arguments: str, flags: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that runs ``module`` in this interpreter.

    Args:
        flags: for the interpreter; ``-P`` keeps the working directory off the child's import path.
    """
    return (sys.executable, *flags, "-m", module, *arguments)


def package_path(inherited: Mapping[str, str]) -> str:
    """Return a ``PYTHONPATH`` with this package first, then the folders in ``inherited``."""
    others = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", PACKAGE_ROOT)]
    return os.pathsep.join([PACKAGE_ROOT, *others])


def package_environment() -> dict[str, str]:
    """Return a copy of this process's environment in which a child finds this package first."""
    return {**os.environ, "PYTHONPATH": package_path(os.environ)}


def reuse_freed_memory() -> None:
    """Keep up to 128 MiB of freed memory in the process instead of returning it at once.

    By default glibc returns a freed block of a few hundred KiB to the system, so every message causes page faults
    again: up to half of a process's time for a 256 KiB group. With other C libraries this does nothing.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class ParentWatch:
    """The parent's side of the pipe: open as long as the parent lives."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec, so only ``spawn`` passes one to a child

    def spawn(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` in a new process group and append its output to ``log``. It ends when this process ends.

        It inherits the descriptors ``pass_fds``.

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
                pass_fds=(self.read_fd, *pass_fds),
                start_new_session=True,
            )

    def close(self) -> None:
        """Close the pipe. Children that still live end themselves."""
        os.close(self.read_fd)
        os.close(self._write_fd)


def watch_parent() -> bool:
    """End this process (and the group it leads) when the parent dies.

    Return False, and do nothing, if the environment variable is not set. Remove the variable, because the children of
    this process don't inherit the descriptor.
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
    _parent_is_gone.set()
    sys.stderr.write("the parent process is gone: ending\n")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _kill_group_and_exit(grace_s=0.0)  # SIGTERM would end only this process and leave its group running
    # Not a daemon: the interpreter waits for the thread, so the group is killed even if the main thread ends first.
    threading.Thread(target=_kill_group_and_exit, args=(GRACE_S,), name="parent-watch-end", daemon=False).start()
    os.kill(os.getpid(), signal.SIGTERM)


def is_parent_gone() -> bool:
    """Whether the parent that ``watch_parent`` watches has died. SIGTERM then comes from ``watch_parent``."""
    return _parent_is_gone.is_set()


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


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine lives. A zombie (dead, but not yet waited for) does not live."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return True


def kill_group(leader: int, signum: int) -> None:
    """Send ``signum`` to the process group that ``leader`` leads; do nothing if the group is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signum)
