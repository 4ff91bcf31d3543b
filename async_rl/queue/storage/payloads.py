"""Payload stores: keep encoded groups as byte strings, read and release them by their ``PayloadRef``.

The queue's core stores summaries only. ``MemoryPayloads`` keeps payloads in this process; ``journal.Journal`` keeps
them in segment files, so that they outlive it; ``RecentPayloads`` keeps recent ones of another store in memory, too.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import msgspec
import xxhash

Bytes = bytes | bytearray | memoryview
Payload = Bytes
_COPY_BELOW_BYTES = 32 << 10


class PayloadRef(msgspec.Struct, frozen=True, gc=False):
    """The place of one payload in its store. ``digest`` is its xxh3_64, or 0 in memory."""

    segment: int
    offset: int
    length: int
    digest: int


class PayloadStore(Protocol):
    """Keeps payloads until they are released."""

    def keep(self, payload: Payload) -> PayloadRef:
        """Store ``payload``, which must not change any more."""
        ...

    def read(self, ref: PayloadRef) -> Payload:
        """The payload at ``ref``.

        Raises:
            QueueError: the payload is gone or damaged.
        """
        ...

    def release(self, ref: PayloadRef) -> None:
        """Release ``ref``, which is never read again."""
        ...


def owned(payload: Payload) -> Payload:
    """Return ``payload`` in memory that may be kept: the payload itself if it fills its buffer, else a copy.

    A view of a part would keep the whole message in memory. So may a small message: libzmq lets several share a buffer.
    """
    whole = payload.obj if isinstance(payload, memoryview) else payload
    is_whole = len(payload) >= _COPY_BELOW_BYTES and memoryview(whole).nbytes == len(payload)
    return payload if is_whole else bytes(payload)


def digest_of(payload: Bytes) -> int:
    """xxh3_64 of the bytes."""
    return xxhash.xxh3_64_intdigest(payload)


class MemoryPayloads:
    """Payloads in memory; they die with the process."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._payloads)

    def keep(self, payload: Payload) -> PayloadRef:
        number = next(self._numbers)
        self._payloads[number] = owned(payload)
        return PayloadRef(0, number, len(payload), digest=0)

    def read(self, ref: PayloadRef) -> Payload:
        return self._payloads[ref.offset]

    def release(self, ref: PayloadRef) -> None:
        del self._payloads[ref.offset]


class RecentPayloads:
    """Another store's payloads, with up to ``max_bytes`` of them in memory too: most are read once, and soon."""

    def __init__(self, store: PayloadStore, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._recent: dict[PayloadRef, Payload] = {}
        self.num_bytes = 0

    def keep(self, payload: Payload) -> PayloadRef:
        ref = self._store.keep(payload)
        if self.num_bytes + ref.length <= self._max_bytes:
            self._recent[ref] = owned(payload)
            self.num_bytes += ref.length
        return ref

    def read(self, ref: PayloadRef) -> Payload:
        payload = self._recent.get(ref)
        return self._store.read(ref) if payload is None else payload

    def release(self, ref: PayloadRef) -> None:
        self._store.release(ref)
        if self._recent.pop(ref, None) is not None:
            self.num_bytes -= ref.length
