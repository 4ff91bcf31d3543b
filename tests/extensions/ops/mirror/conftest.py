"""Every test of a mirror begins with an empty store in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from async_rl.extensions.ops.mirror import fetch as fetching
from tests.extensions.ops.mirror.runs import Clock


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(fetching, "time", found)
    return found
