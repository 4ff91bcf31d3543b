"""The generator's bulk side: one thread that receives one version at a time, by whichever inlet it is told to use.

The receiver's control thread submits orders; what came of them is handed back by ``reply``, as the message that the
publisher is to hear. The buffers are written to here alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from async_rl.errors import CorruptWeightsError
from async_rl.weights import control
from async_rl.weights.background import JobThread
from async_rl.weights.buffers import Buffers
from async_rl.weights.collective.receiver import CollectiveInlet, CollectiveOrder
from async_rl.weights.manifest import Manifest
from async_rl.weights.tcp.receiver import StreamInlet, StreamOrder
from async_rl.weights.transport import Inlet

Reply = Callable[[control.MemberMessage], None]


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Cumulative. ``corrupt`` transfers brought bytes that did not match their digests; they count as failed too.

    ``corrupt_buckets`` came again by themselves. ``wire_bytes`` is what was transferred for ``received_bytes``.
    """

    received: int = 0
    failed: int = 0
    corrupt: int = 0
    corrupt_buckets: int = 0
    receive_s: float = 0.0
    received_bytes: int = 0
    wire_bytes: int = 0


class Transfers:
    """Receives into ``buffers``; ``arrived`` is called in the transfer thread for every version that is whole."""

    def __init__(self, buffers: Buffers, arrived: Callable[[], None], device: str | None) -> None:
        self._buffers = buffers
        self._arrived = arrived
        self._collective = CollectiveInlet(device)
        self._stream = StreamInlet()
        self._jobs = JobThread("weights-transfer")
        self.stats = ReceiverStats()
        self.error: str | None = None

    def prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        """Make room for a version that will come by the collective."""
        self._jobs.submit(lambda: self._prepare(manifest, attempt, reply))

    def collect(self, order: CollectiveOrder, manifest: Manifest, reply: Reply) -> None:
        """Take part in the collective."""
        go = order.go
        deadline = time.monotonic() + go.deadline_s
        self._jobs.submit(lambda: self._receive(self._collective, order, manifest, go.attempt, deadline, reply))

    def pull(self, order: StreamOrder, manifest: Manifest, reply: Reply) -> None:
        """Get it from the stream."""
        fetch = order.fetch
        deadline = time.monotonic() + fetch.deadline_s
        self._jobs.submit(lambda: self._receive(self._stream, order, manifest, fetch.attempt, deadline, reply))

    def disconnect(self) -> None:
        """Let go of all connections: the communicator was of an epoch that is over (numbers may come again)."""
        self._jobs.submit(self._close)

    def close(self, timeout_s: float) -> None:
        """Let go of all connections after the jobs that are left, and end; that is waited for so long."""
        self._jobs.close(self._close, timeout_s)

    # The transfer thread. Jobs hand on what came of them and raise nothing.

    def _prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        try:
            self._buffers.reserve(manifest)
        except RuntimeError as error:
            self._failed(manifest, attempt, _no_memory(manifest, error), reply)
            return
        reply(control.Ready(attempt))

    def _receive(
        self, inlet: Inlet[Any], order: Any, manifest: Manifest, attempt: int, deadline: float, reply: Reply
    ) -> None:
        start = time.monotonic()
        try:
            buffer = self._buffers.reserve(manifest)
            filled = inlet.fill(order, manifest, buffer, self._buffers, deadline=deadline)
        except Exception as error:
            # Whatever it was, the publisher must know, and a communicator is of no use any more.
            is_corrupt = isinstance(error, CorruptWeightsError)
            if not is_corrupt:
                inlet.close()
            self._failed(manifest, attempt, str(error) or repr(error), reply, is_corrupt=is_corrupt)
            return
        elapsed_s = time.monotonic() - start
        staged = self._buffers.commit(buffer, manifest, elapsed_s)
        reply(control.Ack(attempt, staged.version, staged.digest, filled.wire_bytes, filled.num_corrupt))
        self.error = None
        before = self.stats
        self.stats = replace(
            before,
            received=before.received + 1,
            corrupt_buckets=before.corrupt_buckets + filled.num_corrupt,
            receive_s=before.receive_s + elapsed_s,
            received_bytes=before.received_bytes + manifest.size_bytes,
            wire_bytes=before.wire_bytes + filled.wire_bytes,
        )
        self._arrived()

    def _failed(self, manifest: Manifest, attempt: int, reason: str, reply: Reply, *, is_corrupt: bool = False) -> None:
        self.stats = replace(self.stats, failed=self.stats.failed + 1, corrupt=self.stats.corrupt + is_corrupt)
        self.error = f"version {manifest.version} did not arrive: {reason}"
        reply(control.Failed(attempt, reason, is_corrupt))

    def _close(self) -> None:
        self._collective.close()
        self._stream.close()


def _no_memory(manifest: Manifest, error: Exception) -> str:
    return f"no host memory for {manifest.size_bytes} bytes of weights: {error}"
