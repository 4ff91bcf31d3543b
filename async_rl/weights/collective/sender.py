"""The learner's side of ``nccl`` and ``gloo``: a thread that runs the collectives over the epoch's communicator."""

from __future__ import annotations

import socket
import time

from async_rl.net.sockets import listening_socket
from async_rl.weights import control
from async_rl.weights.background import JobThread
from async_rl.weights.collective.communicator import Communicator
from async_rl.weights.manifest import manifest_fields
from async_rl.weights.transport import CollectiveSettings, Delivery, Send, TransportName


class CollectiveSender:
    """Rank 0 of every communicator. See ``transport.TransportSender``."""

    def __init__(self, transport: TransportName, settings: CollectiveSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._listener: socket.socket | None = None
        self._communicator: Communicator | None = None
        self._jobs = JobThread("weights-send")

    def deliver(self, delivery: Delivery, send: Send) -> None:
        """Broadcast to all members at once, in the background."""
        port = self._listen() if delivery.build else 0
        size = len(delivery.members) + 1
        manifest = manifest_fields(delivery.staged.manifest) if delivery.skips_prepare else {}
        remaining_s = control.seconds_until(delivery.deadline)
        for rank, member in enumerate(delivery.members, start=1):
            start = control.StartCollective(
                attempt=delivery.attempt,
                epoch=delivery.epoch,
                rank=rank,
                size=size,
                store_port=port,
                stall_s=self._settings.stall_s,
                deadline_s=remaining_s,
                chunk_bytes=self._settings.chunk_bytes,
                transport=self._transport,
                manifest=manifest,
            )
            send(member.member_id, start)
        # Only now: the members take longer to come than the sending thread takes to start.
        listener, self._listener = self._listener, None
        self._jobs.submit(lambda: self._send(delivery, listener, size))

    def end(self, attempt: int, *, intact: bool) -> None:
        """Close the communicator, unless the attempt left it intact."""
        if not intact:
            self._jobs.submit(self._disconnect)

    def close(self, timeout_s: float) -> bool:
        if self._listener is not None:
            self._listener.close()
        return self._jobs.close(self._disconnect, timeout_s)

    def _listen(self) -> int:
        """Return the port of a new store, over which the next send creates a communicator."""
        if self._listener is not None:
            self._listener.close()
        self._listener = listening_socket(self._settings.bind_host)
        return self._listener.getsockname()[1]

    # The sending thread.

    def _send(self, delivery: Delivery, listener: socket.socket | None, size: int) -> None:
        start = time.monotonic()
        error: Exception | None = None
        try:
            if listener is not None:
                self._connect(listener, size)
            assert self._communicator is not None, "a send without a communicator"
            for bucket in delivery.staged.buckets:
                self._communicator.broadcast(bucket, chunk_bytes=self._settings.chunk_bytes, deadline=delivery.deadline)
        except Exception as caught:
            # The publisher counts it. After any error the communicator can't be used again.
            error = caught
            self._disconnect()
        self._settings.on_sent(delivery, time.monotonic() - start, error)

    def _connect(self, listener: socket.socket, size: int) -> None:
        self._disconnect()
        self._communicator = Communicator.create(
            self._transport,
            store_host=self._settings.local_host,
            store_port=listener.getsockname()[1],
            rank=0,
            size=size,
            stall_s=self._settings.stall_s,
            local_host=self._settings.local_host,
            listener=listener,
            device=self._settings.device,
        )

    def _disconnect(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()
