"""The lock of a run directory: only one ``launch`` or one ``learner`` may use the directory at a time.

The lock is a flock of the file ``run.lock``, which also names the processes that hold the lock. ``launch`` passes the
locked descriptor to its learner, so the lock lasts as long as one of these two processes is alive. With the lock, a
second ``launch`` fails at its start. The queue server protects the files, too: it refuses requests of an older learner
after a newer learner has attached. But ``launch --takeover`` starts another queue server, which the older learner does
not ask. So before a learner writes files, it asks its queue server and also checks the lock.

``launch`` and the learner's rank 0 call ``locked_run_dir``. A learner that ``launch`` started calls
``RunLock.inherit``.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from async_rl.config.config import Config
from async_rl.errors import LineageError, RunError
from async_rl.process.child import is_alive
from async_rl.run.directory import RunDir, move_aside
from async_rl.run.reuse import check_run_dir, prepare_run_dir, starts_over

logger = logging.getLogger(__name__)

LOCK_FD = "ASYNC_RL_RUN_LOCK_FD"
"""Name of the environment variable with the number of the locked descriptor that ``launch`` passes to its learner."""
ENDING_S = 10.0
"""Longest wait, in seconds, for a lock whose holder has died. The holder's children keep the lock until they end, too,
which takes a few seconds."""
_LOOK_AGAIN_S = 0.05
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of a file system that does not support locks."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds the lock of a run directory, as the file ``run.lock`` names it.

    Attributes:
        pid: the process id.
        host: the name of the process's machine.
        role: the subcommand of async-rl that the process runs: ``launch``, ``learner``, ``sft``, ``rm`` or ``dpo``.
    """

    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    host: str
    role: str

    @property
    def is_local(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def may_live(self) -> bool:
        """Whether the process may still be alive. True if it is on another machine, because that can't be checked."""
        return not self.is_local or is_alive(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} (async-rl {self.role}){'' if self.is_local else f' on {self.host}'}"


class RunLock:
    """The lock of a run directory, held by this process. ``path`` is the lock file, ``fd`` its open descriptor."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    @classmethod
    def inherit(cls, run_dir: RunDir, role: str) -> RunLock | None:
        """Return the lock that ``launch`` passed to this process; None if ``launch`` did not start this process.

        The lock file then names this process as a holder, too. ``role`` is the name of its subcommand.

        Raises:
            RunError: since ``launch`` took the lock, another process has taken over the run directory.
        """
        value = os.environ.pop(LOCK_FD, None)
        if value is None:
            return None
        os.set_inheritable(int(value), False)
        lock = cls(run_dir.lock, int(value))
        try:
            lock.check()
        except LineageError as error:
            raise RunError(f"run.dir: {error}; stop this launch, and let the other process continue the run") from None
        lock.record(role)
        return lock

    @property
    def is_current(self) -> bool:
        """Whether this process's lock is still valid.

        It is not after another process has taken over the run directory or moved it. ``run.lock`` is then another file
        than the one that this process has locked.
        """
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
            raise LineageError(
                f"{holder_of(self.path) or 'another process'} has taken over {self.path.parent}; this process ends, "
                f"because only one may write there"
            )

    def record(self, role: str) -> None:
        """Append this process, with its subcommand ``role``, to the holders in the lock file."""
        line = msgspec.json.encode(Holder(os.getpid(), socket.gethostname(), role)) + b"\n"
        os.pwrite(self.fd, line, os.fstat(self.fd).st_size)

    def close(self) -> None:
        """Close the lock file in this process. The lock is free when all processes that hold it have closed it."""
        os.close(self.fd)


def acquire(run_dir: RunDir, role: str, *, takeover: bool = False) -> RunLock:
    """Lock the run directory and return the lock. Create the directory if it does not exist.

    Args:
        role: the subcommand of async-rl that this process runs, for the lock file.
        takeover: if another process holds the lock, replace the lock file by a new one, so that the other process's
            lock is no longer valid.

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
            holders = _read_holders(fd)
            lock.close()
            holder = _first_living(holders)
            if takeover:
                logger.warning("run.dir: taking over %s from %s", run_dir.path, holder or "an unknown process")
                return _take_over(run_dir, role)
            # The first took the lock and the others are its children. If it has died, they end as well.
            is_ending = not holders or not holders[0].may_live
            if is_ending and time.monotonic() < deadline:
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
    """Lock and prepare the run directory of ``config``, and yield the directory and its lock. Unlock it at the end.

    The run that is there is moved aside with ``fresh``, or if it made no step and has another config. The lock of the
    old directory is then also held until the end of the block.

    Raises:
        RunError: another process uses the directory, or ``prepare_run_dir`` refuses it.
    """
    run_dir = check_run_dir(config, fresh=fresh)
    locks = [acquire(run_dir, role, takeover=takeover)]
    try:
        is_useless = not fresh and starts_over(run_dir, config)
        if is_useless or (fresh and run_dir.config.exists()):
            aside = move_aside(run_dir.path)
            if is_useless:
                logger.warning(
                    "run.dir: the run in %s had another config and made no step; it is now %s, and a new run starts",
                    run_dir.path, aside,
                )  # fmt: skip
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
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "%s: this file system does not support locks (%s); make sure that no other process uses this run directory",
            run_dir.path,
            error,
        )
    return True


def _take_over(run_dir: RunDir, role: str) -> RunLock:
    """Replace the lock file by a new file that this process has locked. Return the new lock."""
    partial = run_dir.lock.with_name(f".{run_dir.lock.name}.{os.getpid()}.partial")
    lock = RunLock(run_dir.lock, os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644))
    _try_lock(lock.fd, run_dir)
    lock.record(role)
    os.replace(partial, run_dir.lock)
    return lock


def holder_of(path: Path) -> Holder | None:
    """Return the process that the lock file ``path`` names, one that may be alive if it can. None if it names none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return _first_living(_read_holders(file.fileno()))
    return None


def _read_holders(fd: int) -> list[Holder]:
    """Return the processes named in the open lock file ``fd``: first the one that took the lock, then its children."""
    *lines, _ = os.pread(fd, 1 << 16, 0).decode("utf-8", errors="replace").split("\n")
    holders: list[Holder] = []
    for line in lines:
        with suppress(ValueError, RecursionError):  # a damaged line, which is only shown
            holders.append(msgspec.json.decode(line, type=Holder))
    return holders


def _first_living(holders: Sequence[Holder]) -> Holder | None:
    """Return the first process that may be alive or, if all have died, the first one. None if there is none."""
    return next((holder for holder in holders if holder.may_live), holders[0] if holders else None)
