"""Where the encoded groups lie: a store of byte strings that the buffer keeps, reads and releases by their place.

The buffer itself holds facts only. ``MemoryBodies`` keeps everything in this process; ``journal.Journal`` keeps the
bodies in segment files, so that they outlive it, and ``RecentBodies`` saves reading them again. No sockets, no threads.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import msgspec
import xxhash

Bytes = bytes | bytearray | memoryview
Body = Bytes
_COPY_BELOW_BYTES = 32 << 10


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where one body lies; a store says what ``segment`` and ``offset`` mean. ``digest``: its xxh3_64, 0 in memory."""

    segment: int
    offset: int
    length: int
    digest: int


class BodyStore(Protocol):
    """Keeps bodies until they are released."""

    def keep(self, body: Body) -> Place:
        """Store ``body``, which must not change any more."""
        ...

    def read(self, place: Place) -> Body:
        """The body at ``place``.

        Raises:
            QueueError: they are gone or damaged.
        """
        ...

    def release(self, place: Place) -> None:
        """``place`` is never read again."""
        ...


def owned(body: Body) -> Body:
    """``body`` in memory that may be kept: its own where it fills all of it, else a copy.

    A part would keep its whole message. So may a small message: libzmq lets several share a buffer.
    """
    whole = body.obj if isinstance(body, memoryview) else body
    is_whole = len(body) >= _COPY_BELOW_BYTES and memoryview(whole).nbytes == len(body)
    return body if is_whole else bytes(body)


def digest_of(body: Bytes) -> int:
    """xxh3_64 of the bytes."""
    return xxhash.xxh3_64_intdigest(body)


class MemoryBodies:
    """Bodies in memory; they die with the process."""

    def __init__(self) -> None:
        self._bodies: dict[int, Body] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._bodies)

    def keep(self, body: Body) -> Place:
        number = next(self._numbers)
        self._bodies[number] = owned(body)
        return Place(0, number, len(body), digest=0)

    def read(self, place: Place) -> Body:
        return self._bodies[place.offset]

    def release(self, place: Place) -> None:
        del self._bodies[place.offset]


class RecentBodies:
    """Another store's bodies, of which up to ``max_bytes`` are in memory besides: most are read once, and soon."""

    def __init__(self, store: BodyStore, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._recent: dict[Place, Body] = {}
        self.num_bytes = 0

    def keep(self, body: Body) -> Place:
        place = self._store.keep(body)
        if self.num_bytes + place.length <= self._max_bytes:
            self._recent[place] = owned(body)
            self.num_bytes += place.length
        return place

    def read(self, place: Place) -> Body:
        body = self._recent.get(place)
        return self._store.read(place) if body is None else body

    def release(self, place: Place) -> None:
        self._store.release(place)
        if self._recent.pop(place, None) is not None:
            self.num_bytes -= place.length
