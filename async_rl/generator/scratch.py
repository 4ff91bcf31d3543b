"""A generator's own directory in the system's temporary one: for model and tokenizer files, gone when it ends.

A generator that was killed leaves its directory behind. Each holds a lock, which ends with its process, so the next
generator on the machine can tell what nobody owns any more, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "async-rl-generator-"
_LOCK = "lock"
_YOUNG_S = 60.0
"""A directory that is younger may be just before it takes its lock."""


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """An empty directory but for its lock. Those of dead generators of the same user go first."""
    _remove_ownerless(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        lock = os.open(Path(name) / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def _remove_ownerless(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR)
        except OSError:
            # Another user's, or just being made: not ours to judge.
            continue
        if time.time() - os.fstat(lock).st_mtime < _YOUNG_S:
            os.close(lock)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
