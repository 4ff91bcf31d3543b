"""The publisher's thread that sits in collectives: one send at a time, over a communicator kept between sends."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from async_rl.weights.background import JobThread
from async_rl.weights.collective import CollectiveGroup, listening_socket

Done = Callable[[float, Exception | None], None]
"""Called in the sender's thread: seconds that the send took, and why it failed, if it did."""


class Sender:
    """Rank 0 of every communicator.

    Args:
        bind_host: where stores listen, a wildcard included.
        local_host: an address of this machine at which both the stores and the collectives can be reached.
        stall_s, chunk_bytes, device: see ``CollectiveGroup``.
    """

    def __init__(
        self, transport: str, *, bind_host: str, local_host: str, stall_s: float, chunk_bytes: int, device: str | None
    ) -> None:
        self._transport = transport
        self._bind_host = bind_host
        self._local_host = local_host
        self._stall_s = stall_s
        self._chunk_bytes = chunk_bytes
        self._device = device
        self._listener: socket.socket | None = None
        self._group: CollectiveGroup | None = None
        self._jobs = JobThread("weights-send")

    def listen(self) -> int:
        """The port of a new store. The next send builds a new communicator over it."""
        if self._listener is not None:
            self._listener.close()
        self._listener = listening_socket(self._bind_host)
        return self._listener.getsockname()[1]

    def send(self, buckets: Sequence[Tensor], *, size: int, deadline: float, done: Done) -> None:
        """Broadcast the buckets to ``size - 1`` others; returns at once, ``done`` tells how it went."""
        listener, self._listener = self._listener, None
        self._jobs.submit(lambda: self._send(buckets, listener, size, deadline, done))

    def disconnect(self) -> None:
        """Let go of the communicator, after the send under way."""
        self._jobs.submit(self._close_group)

    def close(self, timeout_s: float) -> bool:
        """Let go of everything; whether a send under way ended within ``timeout_s``."""
        if self._listener is not None:
            self._listener.close()
        return self._jobs.close(self._close_group, timeout_s)

    def _send(
        self, buckets: Sequence[Tensor], listener: socket.socket | None, size: int, deadline: float, done: Done
    ) -> None:
        start = time.monotonic()
        error: Exception | None = None
        try:
            if listener is not None:
                self._connect(listener, size)
            assert self._group is not None, "a send without a communicator"
            for bucket in buckets:
                self._group.broadcast(bucket, chunk_bytes=self._chunk_bytes, deadline=deadline)
        except Exception as caught:
            # Told to the publisher, which counts it; whatever it was, this communicator is of no use any more.
            error = caught
            self._close_group()
        done(time.monotonic() - start, error)

    def _connect(self, listener: socket.socket, size: int) -> None:
        self._close_group()
        self._group = CollectiveGroup.create(
            self._transport,
            store_host=self._local_host,
            store_port=listener.getsockname()[1],
            rank=0,
            size=size,
            stall_s=self._stall_s,
            local_host=self._local_host,
            listener=listener,
            device=self._device,
        )

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
