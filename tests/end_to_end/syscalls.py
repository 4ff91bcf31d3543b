"""System calls of a run's processes that fail on purpose, by a C library that is loaded into them.

``Syscalls`` builds the library and says which calls a run made. ``SyscallRun`` goes on after each failure.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from errno import EINTR, EIO, EMFILE, ENOSPC
from pathlib import Path

import pytest

from tests.end_to_end.faults_harness import FaultRun
from tests.end_to_end.harness import Role

ERRORS: dict[str, tuple[int, ...]] = {
    "open": (EMFILE, EIO, EINTR),
    "open-new": (ENOSPC, EMFILE, EIO, EINTR),
    "rename": (ENOSPC, EIO),
    "mkdir": (ENOSPC, EIO),
    "accept": (EMFILE, EINTR),
    "fsync": (ENOSPC, EIO, EINTR),
    "fdatasync": (ENOSPC, EIO, EINTR),
    "ftruncate": (EIO, EINTR),
    "ftruncate64": (EIO, EINTR),
    "posix_fallocate64": (ENOSPC, EIO, EINTR),
}
"""Errors that the manual page of a call names. Every other call is a write."""
WRITE_ERRORS = (ENOSPC, EIO, EINTR)
FULL_S = 1.5
"""How long a disk stays full."""
CAUSES = (
    "No space left", "Input/output error", "Too many open files", "free file descriptor", "Interrupted system call",
    "disk I/O error", "disk is full", "unable to open database", "os error", "can't be read or written",
    "can't write the checkpoint",
)  # fmt: skip
"""What a message says that names the cause: the texts of the C library, of SQLite, of Rust and of the product."""


@dataclass(frozen=True, order=True)
class Failure:
    """One call that fails: ``place`` is "ROLE FUNCTION PATH", ``skip`` how many of these calls succeed before."""

    place: str
    error: int
    skip: int = 0

    @property
    def role(self) -> str:
        return self.place.split()[0]

    def __str__(self) -> str:
        return f"{self.place}: {os.strerror(self.error)}, after {self.skip}"


class Syscalls:
    """The library's directory: which calls were seen, which one fails next."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("failing system calls need a C compiler (cc)")
        directory.mkdir()
        self._directory = directory
        self._library = directory / "faults.so"
        source = Path(__file__).with_name("syscall_faults.c")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)

    def environment(self, run_dir: Path) -> dict[str, str]:
        """What loads the library into a process, to look at calls below ``run_dir``."""
        return {
            "SYSCALLS_DIR": str(self._directory), "SYSCALLS_RUN": str(run_dir), "LD_PRELOAD": str(self._library)
        }  # fmt: skip

    def pop_places(self) -> list[str]:
        """Places that processes reached first since the last call, in that order."""
        seen = self._directory / "seen"
        places = seen.read_text().splitlines() if seen.exists() else []
        seen.unlink(missing_ok=True)
        return list(dict.fromkeys(places))

    def arm(self, failure: Failure) -> None:
        """Make the next call at this place fail, after ``skip`` others."""
        draft = self._directory / "draft"
        draft.write_text(f"{failure.place} {failure.error} {failure.skip}\n")
        draft.rename(self._directory / "armed")

    @property
    def has_hit(self) -> bool:
        """Whether the armed call failed. ``clear`` forgets it."""
        return (self._directory / "hit").exists()

    def clear(self) -> None:
        """Disarm, and end a full disk."""
        for name in ("armed", "hit", "full"):
            (self._directory / name).unlink(missing_ok=True)


def failures_at(places: Iterable[str]) -> list[Failure]:
    """Every error that each place can meet."""
    return [Failure(place, error) for place in places for error in ERRORS.get(place.split()[1], WRITE_ERRORS)]


class SyscallRun(FaultRun):
    """A run whose roles may end, if they say why; then the same command starts them again."""

    def __init__(
        self, directory: Path, config: Path, start: Callable[..., Role], syscalls: Syscalls, *, is_launched: bool
    ) -> None:
        super().__init__(directory, config, start)
        self._environment.update(syscalls.environment(self.run_dir))
        self._syscalls, self._is_launched = syscalls, is_launched
        self._log_dir, self._log_starts = directory / "logs", dict[str, int]()
        self._failure: Failure | None = None
        self._hit_at: float | None = None
        self.num_ends = 0

    def begin(self) -> None:
        """Start the roles, and wait for the first step."""
        if self._is_launched:
            self.launch()
        else:
            super().begin()

    def arm(self, failure: Failure) -> None:
        self._failure, self._hit_at = failure, None
        self._syscalls.arm(failure)

    def is_over(self) -> bool:
        """Whether the armed call has failed, and the disk has room again."""
        if self._syscalls.has_hit and self._hit_at is None:
            self._hit_at = time.monotonic()
        is_over = self._hit_at is not None and time.monotonic() >= self._hit_at + FULL_S
        if is_over:
            self._syscalls.clear()
        return is_over

    @property
    def has_hit(self) -> bool:
        return self._hit_at is not None

    def tend(self) -> None:
        """Start again what ended. Raises AssertionError: a role ended, and did not say why."""
        self.is_over()
        for name, role in list(self._roles.items()):
            code = role.process.poll()
            if code is None or (code == 0 and self.is_finished):
                continue
            if code != -signal.SIGKILL:
                log = self._log_of_last(name)
                said = f"{name} exited {code} after {self._failure}:\n{log[-4000:]}"
                assert code > 0, said
                assert any(cause in log for cause in CAUSES), said
                self.num_ends += 1
            self._begin_role(name, *role.arguments)

    def kill_role(self, role: str) -> None:
        """SIGKILL a process of ``role``, so that another one begins."""
        if role == "launch":
            self._roles["launch"].kill()
        else:
            self.kill(role)  # pyright: ignore[reportArgumentType]

    def _begin_role(self, name: str, *arguments: str) -> None:
        self._log_starts[name] = len(self._log_of_last(name, everything=True))
        super()._begin_role(name, *arguments)

    def _log_of_last(self, name: str, *, everything: bool = False) -> str:
        path = self._log_dir / f"{name}.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return text if everything else text[self._log_starts.get(name, 0) :]
