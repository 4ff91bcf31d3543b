"""How long a version takes where links, copies and digests have known rates: in simulated time, with the real pipeline.

Two ranks of ``Communicator`` run, one after the other, on a library that only computes when things would end. What one
waits for the other is iterated until it no longer changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from async_rl.learner.cards import HASH, PCIE
from async_rl.weights.collective import library
from async_rl.weights.collective.library import Communicator
from async_rl.weights.collective.receiver import NUM_DIGEST_THREADS, dealt_out

CHUNK_BYTES = 64 << 20
STAND_INS = torch.device("meta")


class Clock:
    """In the place of the module ``time``: its seconds pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ModelLibrary:
    """Implements ``library.Library``. Events are times. ``ready`` are the times at which the peer begins a chunk."""

    device = STAND_INS

    def __init__(self, clock: Clock, link: float, ready: Sequence[float]) -> None:
        self._clock, self._link, self._ready = clock, link, list(ready)
        self._copies_end = self._broadcasts_end = 0.0
        self.begun: list[float] = []

    def broadcast(self, memory: Tensor, timeout_s: float, *, after: float | None = None) -> None:
        ready = max(self._clock.now, after or 0.0)
        peer = self._ready[len(self.begun)] if self._ready else 0.0
        self.begun.append(ready)
        self._broadcasts_end = max(ready, peer, self._broadcasts_end) + memory.numel() / self._link

    def copy(self, target: Tensor, source: Tensor, *, after: float | None = None) -> float:
        begin = max(self._clock.now, after or 0.0, self._copies_end)
        self._copies_end = begin + target.numel() / PCIE
        return self._copies_end

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def state(self) -> bool:
        return True

    def event(self) -> float:
        return self._broadcasts_end

    def done(self, event: float) -> bool:
        return self._clock.now >= event

    def unique_id(self) -> bytes:
        return b""

    def init(self, unique_id: bytes, rank: int, size: int, timeout_s: float) -> None: ...

    def abort(self) -> None: ...


class Digests:
    """The threads that read chunks, as ``receiver._Digests`` uses them."""

    def __init__(self, clock: Clock, sizes: Sequence[int]) -> None:
        self._clock, self._free = clock, [0.0] * NUM_DIGEST_THREADS
        self._thread_of = dealt_out(sizes, NUM_DIGEST_THREADS)

    def add(self, bucket: int, chunk: Tensor) -> Any:
        thread = self._thread_of[bucket]
        self._free[thread] = max(self._clock.now, self._free[thread]) + chunk.numel() / HASH
        return Read(self._clock, self._free[thread])


class Read:
    """In the place of a ``Future``: whoever waits for it finds itself at its end."""

    def __init__(self, clock: Clock, end: float) -> None:
        self._clock, self._end = clock, end

    def result(self) -> None:
        self._clock.now = max(self._clock.now, self._end)


def simulated_s(sizes: Sequence[int], link: float) -> float:
    """Return the seconds until a receiver has verified buckets of these ``sizes`` in bytes, over a ``link`` of so many
    bytes/s.
    """
    buckets = [torch.empty(1, dtype=torch.uint8).expand(size) for size in sizes]  # no memory

    def run(rank: int, ready: Sequence[float]) -> tuple[float, list[float]]:
        clock = Clock()
        made = ModelLibrary(clock, link, ready)
        communicator = Communicator(made, rank=rank, stall_s=3600)
        with mock.patch.object(library, "time", clock):
            communicator.broadcast(
                buckets, chunk_bytes=CHUNK_BYTES, deadline=3600, on_chunk=Digests(clock, sizes).add if rank else None
            )
        return clock.now, made.begun

    ready: list[float] = []
    before, took_s = -1.0, 0.0
    while took_s > before + 1e-6:
        before = took_s
        _, ready = run(0, ready)
        took_s, ready = run(1, ready)
    return took_s
