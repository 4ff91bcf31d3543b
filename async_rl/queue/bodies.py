"""Where the encoded groups lie: a store of byte strings that the buffer keeps, reads and releases by their place.

The buffer itself holds facts only. ``MemoryBodies`` keeps everything in this process; ``journal.Journal`` keeps the
bodies in segment files, so that they outlive it. No sockets, no threads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import xxhash

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Place:
    """Where one body lies. ``digest`` is its xxh3_64; a store says what ``segment`` and ``offset`` mean."""

    segment: int
    offset: int
    length: int
    digest: int


class BodyStore(Protocol):
    """Keeps bodies until they are released."""

    def keep(self, body: Bytes) -> Place:
        """Store a copy of ``body``."""
        ...

    def read(self, place: Place) -> Bytes:
        """The bytes at ``place``.

        Raises:
            QueueError: they are gone or damaged.
        """
        ...

    def release(self, place: Place) -> None:
        """``place`` is never read again."""
        ...


def digest_of(body: Bytes) -> int:
    """xxh3_64 of the bytes."""
    return xxhash.xxh3_64_intdigest(body)


class MemoryBodies:
    """Bodies in memory; they die with the process."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._bodies)

    def keep(self, body: Bytes) -> Place:
        number, kept = next(self._numbers), bytes(body)
        self._bodies[number] = kept
        return Place(0, number, len(kept), digest_of(kept))

    def read(self, place: Place) -> bytes:
        return self._bodies[place.offset]

    def release(self, place: Place) -> None:
        del self._bodies[place.offset]
