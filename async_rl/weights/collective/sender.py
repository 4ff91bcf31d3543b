"""The learner's side of ``gloo`` and ``nccl``: a thread that sits in collectives, a communicator kept between sends."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from async_rl.net.sockets import listening_socket
from async_rl.weights import control
from async_rl.weights.background import JobThread
from async_rl.weights.collective.communicator import CollectiveGroup
from async_rl.weights.manifest import manifest_fields
from async_rl.weights.transport import Delivery, Tell

Done = Callable[[Delivery, float, Exception | None], None]
"""Called in the sender's thread: seconds that the send took, and why it failed, if it did."""


class CollectiveSender:
    """Rank 0 of every communicator. See ``transport.Outlet``.

    Args:
        done: told of every send that is over.
        bind_host: where stores listen, a wildcard included.
        local_host: an address of this machine at which both the stores and the collectives can be reached.
        stall_s, chunk_bytes, device: see ``CollectiveGroup``.
    """

    def __init__(
        self,
        transport: str,
        *,
        bind_host: str,
        local_host: str,
        stall_s: float,
        chunk_bytes: int,
        device: str | None,
        done: Done,
    ) -> None:
        self._transport = transport
        self._bind_host = bind_host
        self._local_host = local_host
        self._stall_s = stall_s
        self._chunk_bytes = chunk_bytes
        self._device = device
        self._done = done
        self._listener: socket.socket | None = None
        self._group: CollectiveGroup | None = None
        self._jobs = JobThread("weights-send")

    def deliver(self, delivery: Delivery, tell: Tell) -> None:
        """Broadcast to all members at once, in the background."""
        port = self._listen() if delivery.build else 0
        size = len(delivery.members) + 1
        manifest = manifest_fields(delivery.staged.manifest) if delivery.is_first else {}
        remaining_s = control.seconds_until(delivery.deadline)
        for rank, member in enumerate(delivery.members, start=1):
            go = control.Go(
                delivery.attempt, delivery.epoch, rank, size, port, self._stall_s, remaining_s, self._chunk_bytes,
                self._transport, manifest,
            )  # fmt: skip
            tell(member.member_id, go)
        # Only now: they take longer to come than the thread that sends takes to begin.
        listener, self._listener = self._listener, None
        self._jobs.submit(lambda: self._send(delivery, listener, size))

    def end(self, attempt: int, *, intact: bool) -> None:
        """Let go of the communicator, unless it is as good as before."""
        if not intact:
            self._jobs.submit(self._close_group)

    def close(self, timeout_s: float) -> bool:
        """Let go of everything; whether a send under way ended within ``timeout_s``."""
        if self._listener is not None:
            self._listener.close()
        return self._jobs.close(self._close_group, timeout_s)

    def _listen(self) -> int:
        """The port of a new store, over which the next send builds a new communicator."""
        if self._listener is not None:
            self._listener.close()
        self._listener = listening_socket(self._bind_host)
        return self._listener.getsockname()[1]

    def _send(self, delivery: Delivery, listener: socket.socket | None, size: int) -> None:
        start = time.monotonic()
        error: Exception | None = None
        try:
            if listener is not None:
                self._connect(listener, size)
            assert self._group is not None, "a send without a communicator"
            self._broadcast(self._group, delivery.staged.buckets, delivery.deadline)
        except Exception as caught:
            # Told to the publisher, which counts it; whatever it was, this communicator is of no use any more.
            error = caught
            self._close_group()
        self._done(delivery, time.monotonic() - start, error)

    def _broadcast(self, group: CollectiveGroup, buckets: Sequence[Tensor], deadline: float) -> None:
        for bucket in buckets:
            group.broadcast(bucket, chunk_bytes=self._chunk_bytes, deadline=deadline)

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
