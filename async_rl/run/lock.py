"""The lock of a run directory: one ``launch`` or one ``learner`` at a time.

flock locks ``run.lock``, which names the process that holds the lock. ``launch`` hands the locked descriptor to its
learner, so the lock lasts as long as one of these two processes lives. The lock shows the user early that
another process uses the directory. The queue protects the files: it knows the newest lineage and refuses older ones.
A learner asks both before it writes, because a ``launch --takeover`` starts another queue server.

``launch`` and the learner's rank 0 call ``locked_run_dir``; a learner of ``launch`` calls ``RunLock.inherit``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from async_rl.config.config import Config
from async_rl.errors import LineageError, RunError
from async_rl.process.child import is_alive
from async_rl.run.directory import RunDir, check_run_dir, move_aside, prepare_run_dir

logger = logging.getLogger(__name__)

LOCK_FD = "ASYNC_RL_RUN_LOCK_FD"
"""Environment variable with the number of the descriptor that ``launch`` hands to its learner."""
ENDING_S = 10.0
"""Longest wait, in seconds, for the children of a dead holder, which end soon after it."""
_LOOK_AGAIN_S = 0.05
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds the lock. ``role`` is its command."""

    pid: int
    host: str
    role: str

    @property
    def is_local(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def may_live(self) -> bool:
        """Whether the process may still live, as far as this machine can tell."""
        return not self.is_local or is_alive(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} (async-rl {self.role}){'' if self.is_local else f' on {self.host}'}"


class RunLock:
    """A lock that this process holds. ``fd`` is the descriptor of the lock file."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    @classmethod
    def inherit(cls, run_dir: RunDir, role: str) -> RunLock | None:
        """Take over the descriptor that ``launch`` handed to this process; None if it handed none.

        Raises:
            RunError: another process has taken over the run directory in the meantime.
        """
        value = os.environ.pop(LOCK_FD, None)
        if value is None:
            return None
        os.set_inheritable(int(value), False)
        lock = cls(run_dir.lock, int(value))
        try:
            lock.check()
        except LineageError as error:
            raise RunError(f"{error}; stop this launch, because the other process now writes the run") from None
        lock.record(role)
        return lock

    @property
    def is_current(self) -> bool:
        """Whether the directory's lock file is still this one. It is not after a takeover or a move."""
        try:
            found, own = os.stat(self.path), os.fstat(self.fd)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def check(self) -> None:
        """Check that no other process has taken over the run directory.

        Raises:
            LineageError: another process has taken it over.
        """
        if not self.is_current:
            raise LineageError(f"{_holder_of(self.path) or 'another process'} has taken over {self.path.parent}")

    def record(self, role: str) -> None:
        """Add this process to the holders named in the lock file."""
        line = json.dumps(asdict(Holder(os.getpid(), socket.gethostname(), role))) + "\n"
        os.pwrite(self.fd, line.encode(), os.fstat(self.fd).st_size)

    def close(self) -> None:
        """Close this process's descriptor. The lock ends when the last process has closed it."""
        os.close(self.fd)


def acquire(run_dir: RunDir, role: str, *, takeover: bool = False) -> RunLock:
    """Lock ``run_dir``, and create it if it does not exist. Write nothing else.

    With ``takeover`` supersede a holder: the old holder keeps the old lock file, which has no effect any more.

    Raises:
        RunError: another process holds the lock, or the directory can't be written.
    """
    deadline = time.monotonic() + ENDING_S
    try:
        while True:
            run_dir.path.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(run_dir.lock, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # --fresh of another process moved the directory away
            lock = RunLock(run_dir.lock, fd)
            if _try_lock(fd, run_dir):
                if lock.is_current:
                    os.ftruncate(fd, 0)
                    lock.record(role)
                    return lock
                lock.close()
                continue
            holder = _read_holder(fd)
            lock.close()
            if takeover:
                logger.warning("run.dir: taking over %s from %s", run_dir.path, holder or "an unknown process")
                return _take_over(run_dir, role)
            if (holder is None or not holder.may_live) and time.monotonic() < deadline:
                time.sleep(_LOOK_AGAIN_S)
                continue
            raise RunError(
                f"run.dir: {holder or 'another process'} uses {run_dir.path}; stop it, or choose another run.dir. If "
                f"it does not answer, `async-rl {role} --takeover` takes the run over"
            )
    except OSError as error:
        raise RunError(f"run.dir: can't write to {run_dir.path}: {error}; choose another run.dir") from error


@contextmanager
def locked_run_dir(
    config: Config, *, role: str, fresh: bool, takeover: bool = False
) -> Iterator[tuple[RunDir, RunLock]]:
    """Lock the run directory, then prepare it. The lock is held until the block ends.

    With ``fresh`` the lock of the old directory is held until the new directory is locked.

    Raises:
        RunError: another process uses the directory, or as in ``prepare_run_dir``.
    """
    run_dir = check_run_dir(config, fresh=fresh)
    locks = [acquire(run_dir, role, takeover=takeover)]
    try:
        if fresh and run_dir.config.exists():
            move_aside(run_dir.path)
            locks.append(acquire(run_dir, role))
        prepare_run_dir(config)
        yield run_dir, locks[-1]
    finally:
        for lock in locks:
            lock.close()


def _try_lock(fd: int, run_dir: RunDir) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning(
            "%s: this file system does not support locks (%s); make sure that no other process uses this run directory",
            run_dir.path,
            error,
        )
    return True


def _take_over(run_dir: RunDir, role: str) -> RunLock:
    """Replace the lock file by a new one that this process has locked."""
    partial = run_dir.lock.with_name(f".{run_dir.lock.name}.{os.getpid()}.partial")
    lock = RunLock(run_dir.lock, os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644))
    _try_lock(lock.fd, run_dir)
    lock.record(role)
    os.replace(partial, run_dir.lock)
    return lock


def _holder_of(path: Path) -> Holder | None:
    with suppress(FileNotFoundError), path.open("rb") as file:
        return _read_holder(file.fileno())
    return None


def _read_holder(fd: int) -> Holder | None:
    """Return the first named holder that may live, or else the first named; None if no holder is named yet."""
    *lines, _ = os.pread(fd, 1 << 16, 0).decode("utf-8", errors="replace").split("\n")
    holders = [Holder(**json.loads(line)) for line in lines]
    return next((holder for holder in holders if holder.may_live), holders[0] if holders else None)
