"""Start the child processes of a run, and end them when their parent dies.

``module_command`` and ``package_environment`` make a child run a module of this copy of async-rl. ``ParentWatch`` ends
the children when their parent dies. It is a pipe to which nothing is written. Only the parent (``launch``) has the
pipe's write end, so the kernel closes the pipe when the parent dies, even by SIGKILL. Each child inherits the read end
and calls ``watch_parent``, which ends the child and its process group when the pipe is closed.
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
"""The path of the directory that contains the package ``async_rl``."""
PACKAGE_SOURCES = tuple(map(str, sorted(Path(PACKAGE_ROOT).glob("packages/*/src"))))
"""In a checkout, the directories of the other packages that async-rl's wheel ships. Else they are in PACKAGE_ROOT."""

DEVICES_ARE_DEALT = "ASYNC_RL_DEVICES_ARE_DEALT"
"""The environment variable by which ``launch`` tells a learner rank that ``CUDA_VISIBLE_DEVICES`` has only the
learner's devices, one for each rank."""
PARENT_WATCH_FD = "ASYNC_RL_PARENT_WATCH_FD"
GRACE_S = 5.0
"""Seconds that a process gets to end after SIGTERM. Then it is killed with SIGKILL."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20

_parent_is_gone = threading.Event()


def module_command(module: str, *arguments: str, flags: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command line that runs ``module`` with this Python interpreter.

    Args:
        arguments: the module's command-line arguments.
        flags: options of the interpreter. ``-P`` keeps the working directory off the child's import path.
    """
    return (sys.executable, *flags, "-m", module, *arguments)


def package_path(inherited: Mapping[str, str]) -> str:
    """Return a ``PYTHONPATH`` with which a child process imports this copy of async-rl.

    Its first folders are those of this package and of what it ships. The folders of ``PYTHONPATH`` in the environment
    ``inherited`` follow.
    """
    own = (PACKAGE_ROOT, *PACKAGE_SOURCES)
    paths = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *own)]
    return os.pathsep.join([*own, *paths])


def package_environment() -> dict[str, str]:
    """Return this process's environment variables, with ``PYTHONPATH`` changed so that a child imports this package."""
    return {**os.environ, "PYTHONPATH": package_path(os.environ)}


def run_child(command: Sequence[str], *, stdout: int | None = None) -> int:
    """Run ``command``, which imports this copy of async-rl, until it ends. Return its exit code.

    If this process gets SIGINT or SIGTERM, it waits until the child has ended, too: a ``launch`` saves its last step.
    """
    process = subprocess.Popen(command, env=package_environment(), stdout=stdout)
    try:
        return process.wait()
    except BaseException as error:
        # Ctrl-C has reached the child too, because it is in the terminal's process group.
        if not isinstance(error, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def reuse_freed_memory() -> None:
    """Make the C library keep up to 128 MiB of freed memory in this process instead of returning it to the system.

    By default glibc returns each freed block of a few hundred KiB. Every message then causes page faults again, which
    cost up to half of a process's time with groups of 256 KiB. With other C libraries this function does nothing.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def set_torch_defaults(*, is_learner: bool) -> None:
    """Set torch's environment variables that the user has not set. Call it before torch is imported.

    A learner's micro-batches differ in length from step to step. In expandable segments the freed memory of one serves
    another of any size; otherwise the pieces add up until memory runs out.

    torch's rendezvous warns about every address without a name. A generator outlives failed connections of collectives:
    torch would print a C++ stack trace of each, and raise the same error, which we report. A learner needs these
    traces, because there such an error is the end.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if is_learner else "FATAL")
    if is_learner and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


class ParentWatch:
    """A pipe by which child processes notice that this process has died. Only this process has the pipe's write end.

    ``read_fd`` is the descriptor of the pipe's read end, which the children inherit.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec, so only ``spawn`` passes one to a child

    def spawn(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` in a new process group, append its output to ``log`` and return its process.

        If ``command`` calls ``watch_parent``, it ends when this process ends.

        Args:
            environment: all environment variables of the child.
            pass_fds: more descriptors that the child inherits.

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
        """Close the pipe. Children that are still alive end themselves."""
        os.close(self.read_fd)
        os.close(self._write_fd)


def watch_parent() -> bool:
    """Start a thread that ends this process, and the process group that it leads, when the parent dies.

    Return whether the thread was started. It is not started if this process was not started by ``ParentWatch.spawn``,
    which sets the environment variable ``ASYNC_RL_PARENT_WATCH_FD``. The variable is removed from the environment,
    because this process's children don't inherit the descriptor to which it refers.
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
    """Return whether ``watch_parent`` has noticed that the parent died.

    If so, a SIGTERM that this process receives comes from ``watch_parent`` and not from a user.
    """
    return _parent_is_gone.is_set()


def _kill_group_and_exit(grace_s: float) -> None:
    """Wait up to ``grace_s`` seconds for the main thread to end. Then kill this process and the group that it leads."""
    threading.main_thread().join(grace_s)
    if os.getpgrp() == os.getpid():
        kill_group(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def exit_on_sigterm() -> None:
    """Make SIGTERM raise ``SystemExit`` (code 143) in the main thread, so that ``finally`` blocks run."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def is_alive(pid: int) -> bool:
    """Return whether the process ``pid`` on this machine is alive. Return False for a zombie, which has ended."""
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


def be_killed_first() -> None:
    """Ask the kernel to kill this process, and those that it starts, before others if the machine runs out of memory.

    Where ``/proc`` can't be written, nothing happens.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def kill_group(leader: int, signum: int) -> None:
    """Send the signal ``signum`` to the process group whose leader has the process id ``leader``.

    Do nothing if the group has ended.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signum)
