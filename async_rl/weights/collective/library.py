"""One rank's part in broadcasts: the protocol of a communication library, and the deadlines around its calls.

A library's calls return at once, except where the protocol says otherwise. ``Communicator`` polls, and gives up at its
deadlines. A call that never returns is beyond its reach. The process that made the call is killed then: the broadcaster
by the learner (``sender``), a generator by its own control thread (``weights.channel.receiver``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from async_rl.errors import WeightsError

HOST = torch.device("cpu")
_POLL_S, _LONGEST_POLL_S = 0.0001, 0.001
"""Between two looks at a library: at first, and after a few. A chunk of 64 MiB takes 1 to 7 ms."""
NUM_CONCURRENT_CHUNKS = 3
"""One is copied to the device, one is sent, one is copied from the device. A version's chunks follow each other without
a pause, also where a bucket ends."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank is.

    Attributes:
        learner_host: the address at which the other ranks reach rank 0.
        local_host: the address at which the other ranks reach this one. It is never derived from the host's name.
            Rank 0 listens there.
        device: this rank's CUDA device. None if there is no CUDA device.
    """

    learner_host: str
    local_host: str
    device: str | None = None


class Library(Protocol):
    """One rank's connection to the other ranks of one communicator. Errors are RuntimeErrors. One thread uses it.

    After any error, and when a deadline has passed, only ``abort`` may be called.
    """

    @property
    def device(self) -> torch.device:
        """Where the memory of broadcasts must be."""
        ...

    def unique_id(self) -> bytes:
        """Return what the other ranks need to find this one, at most 256 bytes. Only rank 0 calls this."""
        ...

    def init(self, unique_id: bytes, rank: int, size: int, timeout_s: float) -> None:
        """Begin to connect to the other ranks. It may wait for them, but no longer than ``timeout_s``."""
        ...

    def state(self) -> bool:
        """Return whether the library can take the next call. False: ``init`` or ``broadcast`` is still in progress.

        Raises:
            RuntimeError: the communicator has failed.
        """
        ...

    def broadcast(self, memory: Tensor, timeout_s: float, *, after: Any = None) -> None:
        """Begin to copy rank 0's ``memory``, uint8 [N] on ``device``, into the ``memory`` of every other rank, when the
        event ``after`` is done.
        """
        ...

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory for ``copy`` on a device or the host, uint8 [``num_bytes``]."""
        ...

    def copy(self, target: Tensor, source: Tensor, *, after: Any = None) -> Any:
        """Begin a copy between host and device, when the event ``after`` and the copies that have begun are done.
        Return an event that is done when it has ended. Broadcasts may run meanwhile.
        """
        ...

    def event(self) -> Any:
        """Return an event that is done when the broadcasts that have begun so far have ended."""
        ...

    def done(self, event: Any) -> bool:
        """Return whether ``event`` is done. It may wait, but no longer than the timeout of its broadcast.

        Raises:
            RuntimeError: a broadcast before the event has failed.
        """
        ...

    def abort(self) -> None:
        """Close all connections, so that ranks that wait for this rank fail at once. Never raises."""
        ...


OnChunk = Callable[[int, Tensor], "Future[Any]"]
"""Reads a chunk that has arrived, by the index of its bucket; in another thread. Chunks come in their order."""


class _Chunk(NamedTuple):
    """A chunk in flight: it must be there, on the host if it is read, when ``event`` is done."""

    bucket: int
    event: Any
    until: float
    memory: Tensor


class Communicator:
    """A connected library that carries broadcasts from rank 0, the broadcaster, to the others. One thread uses it.

    Use ``connect`` to create one.
    """

    def __init__(self, library: Library, *, rank: int, stall_s: float) -> None:
        self._library = library
        self._rank = rank
        self._stall_s = stall_s
        self._scratch: dict[tuple[torch.device, int], Tensor] = {}
        self._readers: deque[Future[Any]] = deque()

    @classmethod
    def connect(cls, library: Library, unique_id: bytes, *, rank: int, size: int, stall_s: float) -> Communicator:
        """Connect to the other ranks, and return the communicator of this rank.

        Args:
            library: this rank's library object, which has not been used for another communicator.
            unique_id: what rank 0's ``Library.unique_id`` returned.
            rank: this process's rank.
            size: number of ranks.
            stall_s: how long connecting, and every later collective, may take.

        Raises:
            WeightsError: not all ranks connected in time.
        """
        until = time.monotonic() + stall_s
        try:
            library.init(unique_id, rank, size, stall_s)
            _wait(library.state, until)
        except RuntimeError as error:
            library.abort()
            raise WeightsError(
                f"rank {rank} of {size} could not connect to the others within {stall_s:.1f} s: {_first_line(error)}; "
                f"check the network between them, and that the name server answers: torch waits for it"
            ) from error
        return cls(library, rank=rank, stall_s=stall_s)

    def broadcast(
        self, buckets: Sequence[Tensor], *, chunk_bytes: int, deadline: float, on_chunk: OnChunk | None = None
    ) -> None:
        """Copy rank 0's ``buckets`` into those of every other rank.

        Args:
            buckets: uint8 [N] each, on the host or on a device. If that is not the library's, chunks are copied.
            chunk_bytes: largest number of bytes to send at once.
            deadline: when the broadcast must have ended, on the monotonic clock.
            on_chunk: gets each chunk on the host after it has arrived. The next ones travel meanwhile. Chunks on a
                device are read back for it. All have been read when this returns.

        Raises:
            WeightsError: a peer died or stalled, or the deadline passed. The communicator can't be used again.
        """
        in_flight: deque[_Chunk] = deque()
        try:
            for number, (index, chunk) in enumerate(_chunks(buckets, chunk_bytes)):
                if len(in_flight) == NUM_CONCURRENT_CHUNKS:
                    self._finish(in_flight.popleft(), on_chunk)
                until = min(deadline, time.monotonic() + self._stall_s)
                event, on_host = self._begin(chunk, number, until, is_read=on_chunk is not None)
                in_flight.append(_Chunk(index, event, until, on_host))
            while in_flight:
                self._finish(in_flight.popleft(), on_chunk)
        except RuntimeError as error:
            raise WeightsError(
                f"the broadcast of this version failed: {_first_line(error)}; the learner offers it again"
            ) from error
        finally:
            while self._readers:
                self._readers.popleft().result()

    def close(self) -> None:
        """Close all connections, so that ranks that wait for this rank fail at once."""
        self._library.abort()

    def _begin(self, chunk: Tensor, number: int, until: float, *, is_read: bool) -> tuple[Any, Tensor]:
        """Begin the broadcast of a chunk. Return its event, and the chunk, on the host if ``is_read``."""
        library = self._library
        timeout_s = until - time.monotonic()
        if timeout_s <= 0:
            raise RuntimeError("it did not end within weights.deadline_s")
        memory = chunk if chunk.device == library.device else self._scratch_for(chunk, number, library.device)
        is_copied = memory is not chunk
        copied = library.copy(memory, chunk) if is_copied and self._rank == 0 else None
        library.broadcast(memory, timeout_s, after=copied)
        _wait(library.state, until)
        event = library.event()
        if is_copied and self._rank != 0:
            event = library.copy(chunk, memory, after=event)
        if not is_read or chunk.device == HOST:
            return event, chunk
        # As many chunks may be read as are in flight; those before have left their memory.
        while len(self._readers) > NUM_CONCURRENT_CHUNKS:
            self._readers.popleft().result()
        # From where it lies, so that a digest also covers the way to the device.
        on_host = self._scratch_for(chunk, number, HOST)
        return library.copy(on_host, chunk, after=event), on_host

    def _scratch_for(self, chunk: Tensor, number: int, device: torch.device) -> Tensor:
        """Return memory of the chunk's size, which no chunk in flight has; on the host none that is read, either."""
        key = device, number % (2 * NUM_CONCURRENT_CHUNKS if device == HOST else NUM_CONCURRENT_CHUNKS)
        if key not in self._scratch or self._scratch[key].numel() < chunk.numel():
            self._scratch[key] = self._library.allocate(chunk.numel(), device)
        return self._scratch[key][: chunk.numel()]

    def _finish(self, chunk: _Chunk, on_chunk: OnChunk | None) -> None:
        def is_done() -> bool:
            return self._library.state() and self._library.done(chunk.event)

        _wait(is_done, chunk.until)
        if on_chunk is not None:
            self._readers.append(on_chunk(chunk.bucket, chunk.memory))


def _chunks(buckets: Sequence[Tensor], chunk_bytes: int) -> Iterator[tuple[int, Tensor]]:
    for index, bucket in enumerate(buckets):
        for start in range(0, bucket.numel(), chunk_bytes):
            yield index, bucket[start : start + chunk_bytes]


def _wait(is_over: Callable[[], bool], until: float) -> None:
    """Wait until ``is_over``. A library has nothing else to wait with: it can only be asked.

    Raises:
        RuntimeError: it was not over at ``until``, on the monotonic clock.
    """
    pause_s = _POLL_S
    while not is_over():
        if time.monotonic() > until:
            raise RuntimeError("a peer did not answer in time")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
