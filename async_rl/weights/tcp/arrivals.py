"""What this generator can pass on to others: buckets that have arrived, and the one that is arriving. No torch.

The transfer thread records what it receives. The threads that serve other generators read it, and wait for more. A
bucket is identified by its digest, so its version does not matter here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Arrival:
    """A bucket in memory.

    Attributes:
        digest: the digest that its bytes must have.
        memory: its bytes. Only the first ``filled`` of them have arrived.
        filled: number of bytes that have arrived.
        is_valid: whether the bytes have this digest. None: not known yet. False also if the memory is used for
            something else now, so what was read from it must be discarded.
    """

    __slots__ = ("_changed", "digest", "filled", "is_valid", "memory")

    def __init__(self, digest: str, memory: memoryview, changed: threading.Condition) -> None:
        self.digest, self.memory = digest, memory
        self.filled = 0
        self.is_valid: bool | None = None
        self._changed = changed

    def advance(self, num_bytes: int) -> None:
        """Record that ``num_bytes`` more have arrived."""
        with self._changed:
            self.filled += num_bytes
            self._changed.notify_all()

    def end(self, *, is_valid: bool) -> None:
        """Record that the memory is complete, and whether its bytes have the digest."""
        with self._changed:
            self.filled, self.is_valid = len(self.memory), is_valid
            self._changed.notify_all()

    def wait(self, filled: int, timeout_s: float) -> bool:
        """Wait until ``filled`` bytes have arrived, or the bucket was discarded. Return whether that happened within
        ``timeout_s``.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.filled >= filled or self.is_valid is False, timeout_s)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until ``is_valid`` is known. Return whether that happened within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_valid is not None, timeout_s)


class Arrivals:
    """The buckets of all versions in this generator's memory."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_memory: dict[tuple[int, int], Arrival] = {}

    @contextmanager
    def receiving(self, place: tuple[int, int], digest: str, memory: memoryview) -> Iterator[Arrival]:
        """Record what arrives in ``memory``, while the caller writes to it and at last calls ``Arrival.end``.

        ``place`` identifies the memory: what was recorded there before is discarded. So is the bucket if it is not
        valid.
        """
        arrival = Arrival(digest, memory, self._changed)
        with self._changed:
            if (before := self._by_memory.get(place)) is not None:
                before.is_valid = False
            self._by_memory[place] = arrival
            self._changed.notify_all()
        try:
            yield arrival
        finally:
            if not arrival.is_valid:
                with self._changed:
                    del self._by_memory[place]
                    arrival.is_valid = False
                    self._changed.notify_all()

    def find(self, digest: str, timeout_s: float) -> Arrival | None:
        """Return the bucket with this digest, if it arrives within ``timeout_s``. A complete one is preferred."""
        with self._changed:
            return self._changed.wait_for(lambda: self._find(digest), timeout_s)

    def _find(self, digest: str) -> Arrival | None:
        found = [arrival for arrival in self._by_memory.values() if arrival.digest == digest]
        return max(found, key=lambda arrival: arrival.is_valid or False, default=None)
