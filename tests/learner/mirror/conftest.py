"""Every test of a mirror begins with an empty store in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from async_rl.learner.mirror import fetch as fetching


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # All processes of a test are this one, and count as dead when the next begins.
    monkeypatch.setattr(fetching, "is_alive", lambda _pid: False)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()
