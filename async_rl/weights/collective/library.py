"""One rank's part in broadcasts: the protocol of a communication library, and the deadlines around its calls.

A library's calls return at once, except where the protocol says otherwise. ``Communicator`` polls, and gives up at its
deadlines. A call that never returns is beyond its reach. The process that made the call is killed then: the broadcaster
by the learner (``sender``), a generator by its own control thread (``weights.channel.receiver``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from async_rl.errors import WeightsError

HOST = torch.device("cpu")
_POLL_S = 0.001
_NUM_CONCURRENT_CHUNKS = 2
"""The ranks agree on one chunk while the other is sent."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank is.

    Attributes:
        learner_host: the address at which the other ranks reach rank 0.
        local_host: the address at which the other ranks reach this one. It is never derived from the host's name.
        bind_host: the address at which rank 0 listens. It may be a wildcard. Unused by the other ranks.
        device: this rank's CUDA device. None if there is no CUDA device.
    """

    learner_host: str
    local_host: str
    bind_host: str = ""
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

    def broadcast(self, memory: Tensor, timeout_s: float) -> None:
        """Begin to copy rank 0's ``memory``, uint8 [N] on ``device``, into the ``memory`` of every other rank."""
        ...

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory for ``copy`` on a device or the host, uint8 [``num_bytes``]."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin a copy between host and device, after the broadcasts and copies that have begun so far."""
        ...

    def event(self) -> Any:
        """Return an event that is done when the broadcasts and copies that have begun so far have ended."""
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


class Communicator:
    """A connected library that carries broadcasts from rank 0, the broadcaster, to the others. One thread uses it.

    Use ``connect`` to create one.
    """

    def __init__(self, library: Library, *, rank: int, stall_s: float) -> None:
        self._library = library
        self._rank = rank
        self._stall_s = stall_s
        self._scratch: dict[tuple[torch.device, int], Tensor] = {}

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
        self, bucket: Tensor, *, chunk_bytes: int, deadline: float, on_chunk: Callable[[Tensor], None] | None = None
    ) -> None:
        """Copy rank 0's ``bucket`` into that of every other rank.

        Args:
            bucket: uint8 [N], on the host or on a device. If that is not the library's, chunks are copied.
            chunk_bytes: largest number of bytes to send at once.
            deadline: when the broadcast must have ended, on the monotonic clock.
            on_chunk: called with the bytes of each chunk on the host after it has arrived, in their order. The next
                chunk travels meanwhile. Chunks on a device are read back for it.

        Raises:
            WeightsError: a peer died or stalled, or the deadline passed. The communicator can't be used again.
        """
        in_flight: deque[tuple[Any, float, Tensor]] = deque()
        try:
            for number, start in enumerate(range(0, bucket.numel(), chunk_bytes)):
                if len(in_flight) == _NUM_CONCURRENT_CHUNKS:
                    self._finish(*in_flight.popleft(), on_chunk)
                chunk = bucket[start : start + chunk_bytes]
                until = min(deadline, time.monotonic() + self._stall_s)
                event, on_host = self._begin(chunk, number, until, is_read=on_chunk is not None)
                in_flight.append((event, until, on_host))
            while in_flight:
                self._finish(*in_flight.popleft(), on_chunk)
        except RuntimeError as error:
            raise WeightsError(
                f"the broadcast of this version failed: {_first_line(error)}; the learner offers it again"
            ) from error

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
        if memory is not chunk and self._rank == 0:
            library.copy(memory, chunk)
        library.broadcast(memory, timeout_s)
        _wait(library.state, until)
        if memory is not chunk and self._rank != 0:
            library.copy(chunk, memory)
        if not is_read or chunk.device == HOST:
            return library.event(), chunk
        # From where it lies, so that a digest also covers the way to the device.
        on_host = self._scratch_for(chunk, number, HOST)
        library.copy(on_host, chunk)
        return library.event(), on_host

    def _scratch_for(self, chunk: Tensor, number: int, device: torch.device) -> Tensor:
        """Return memory of the chunk's size. Two chunks are in flight, so that of the one before is not touched."""
        key = device, number % _NUM_CONCURRENT_CHUNKS
        if key not in self._scratch or self._scratch[key].numel() < chunk.numel():
            self._scratch[key] = self._library.allocate(chunk.numel(), device)
        return self._scratch[key][: chunk.numel()]

    def _finish(self, event: Any, until: float, chunk: Tensor, on_chunk: Callable[[Tensor], None] | None) -> None:
        def is_done() -> bool:
            return self._library.state() and self._library.done(event)

        _wait(is_done, until)
        if on_chunk is not None:
            on_chunk(chunk)


def _wait(is_over: Callable[[], bool], until: float) -> None:
    """Wait until ``is_over``. A library has nothing else to wait with: it can only be asked.

    Raises:
        RuntimeError: it was not over at ``until``, on the monotonic clock.
    """
    while not is_over():
        if time.monotonic() > until:
            raise RuntimeError("a peer did not answer in time")
        time.sleep(_POLL_S)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
