"""The generator's transfer thread: receives one version at a time, by the transport that the publisher names.

The receiver's control thread submits orders. Every order ends with one call of its ``reply``, with the message for the
publisher. Only this thread writes to the buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.weights import control
from async_rl.weights.background import JobThread
from async_rl.weights.manifest import Manifest
from async_rl.weights.receive_buffers import ReceiveBuffers
from async_rl.weights.transport import TRANSPORTS, ReceiveOrder, TransportReceiver

Reply = Callable[[control.MemberMessage], None]


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Cumulative counters.

    ``failed`` includes ``corrupt``: transfers whose bytes did not match their digests. ``corrupt_buckets`` were
    received again within a transfer. ``wire_bytes`` were transferred for ``received_bytes``.
    """

    received: int = 0
    failed: int = 0
    corrupt: int = 0
    corrupt_buckets: int = 0
    receive_s: float = 0.0
    received_bytes: int = 0
    wire_bytes: int = 0


class ReceiveWorker:
    """Receives into ``buffers``.

    Args:
        on_received: called in the transfer thread for every version that is complete.
        device: this generator's CUDA device.
    """

    def __init__(self, buffers: ReceiveBuffers, on_received: Callable[[], None], device: str | None) -> None:
        self._buffers = buffers
        self._on_received = on_received
        self._device = device
        self._receivers: dict[str, TransportReceiver[ReceiveOrder]] = {}
        self._jobs = JobThread("weights-transfer")
        self.stats = ReceiverStats()
        self.error: str | None = None

    def prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        """Allocate memory for a version that a collective will bring."""
        self._jobs.submit(lambda: self._prepare(manifest, attempt, reply))

    def receive(self, order: ReceiveOrder[control.StartCollective | control.Pull], reply: Reply) -> None:
        """Receive a version."""
        self._jobs.submit(lambda: self._receive(order, reply))

    def disconnect(self) -> None:
        """Close all connections: the communicator belongs to an epoch that is over (epoch numbers may repeat)."""
        self._jobs.submit(self._disconnect)

    def close(self, timeout_s: float) -> None:
        """Finish the orders that are left, close all connections, and end; wait for that at most ``timeout_s``."""
        self._jobs.close(self._disconnect, timeout_s)

    # The transfer thread. Jobs report their result and raise nothing.

    def _prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        try:
            self._buffers.reserve(manifest)
        except RuntimeError as error:
            reason = f"no host memory for {manifest.size_bytes} bytes of weights: {error}"
            self._fail(manifest, attempt, reason, reply)
            return
        reply(control.Ready(attempt))

    def _receive(self, order: ReceiveOrder, reply: Reply) -> None:
        message, manifest = order.message, order.manifest
        start = time.monotonic()
        try:
            receiver = self._receiver(message.transport)
            buffer = self._buffers.reserve(manifest)
            result = receiver.receive(order, buffer, self._buffers)
        except Exception as error:
            # After any error the publisher must know, and a communicator can't be used again.
            is_corrupt = isinstance(error, CorruptWeightsError)
            if not is_corrupt and message.transport in self._receivers:
                self._receivers[message.transport].close()
            self._fail(manifest, message.attempt, str(error) or repr(error), reply, is_corrupt=is_corrupt)
            return
        elapsed_s = time.monotonic() - start
        received = self._buffers.commit(buffer, manifest, elapsed_s)
        reply(control.Ack(message.attempt, received.version, received.digest, result.wire_bytes, result.num_corrupt))
        self.error = None
        before = self.stats
        self.stats = replace(
            before,
            received=before.received + 1,
            corrupt_buckets=before.corrupt_buckets + result.num_corrupt,
            receive_s=before.receive_s + elapsed_s,
            received_bytes=before.received_bytes + manifest.size_bytes,
            wire_bytes=before.wire_bytes + result.wire_bytes,
        )
        self._on_received()

    def _receiver(self, transport: str) -> TransportReceiver[ReceiveOrder]:
        if transport not in TRANSPORTS:
            raise WeightsError(f"expected one of the transports {list(TRANSPORTS)}, got {transport!r}")
        if transport not in self._receivers:
            self._receivers[transport] = TRANSPORTS[transport].make_receiver(self._device)
        return self._receivers[transport]

    def _fail(self, manifest: Manifest, attempt: int, reason: str, reply: Reply, *, is_corrupt: bool = False) -> None:
        self.stats = replace(self.stats, failed=self.stats.failed + 1, corrupt=self.stats.corrupt + is_corrupt)
        self.error = f"version {manifest.version} was not received: {reason}"
        reply(control.Failed(attempt, reason, is_corrupt))

    def _disconnect(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
