"""The generator's transfer thread and its host memory: receives one version at a time, using the order's transport.

``ReceiveWorker`` is the thread. The receiver's control thread submits orders. Every order ends with one call of its
``reply``, with the message for the publisher. Only the transfer thread writes to the buffers.

``ReceiveBuffers`` holds versions: one in use, one verified and waiting, one being received. The main thread and the
transfer thread both call it; a lock guards the states. A buffer that ``newest`` returned or that is in use
(``activated``) is never written to. Buffers are allocated when first needed: two in the common case, three when
versions come faster than they are activated. torch is imported with the first buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.weights import control
from async_rl.weights.manifest import Manifest, TensorSpec
from async_rl.weights.transport import TRANSPORTS, JobThread, ReceiveOrder, TransportReceiver

if TYPE_CHECKING:
    from torch import Tensor

Reply = Callable[[control.MemberMessage], None]


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedWeights:
    """A verified version in host memory. ``tensors`` are views, valid until a later version is ``activated``.

    ``receive_s`` is the duration of its transfer, during which decoding continued.
    """

    lineage: str
    version: int
    digest: str
    tensors: Mapping[str, Any]
    manifest: Manifest
    receive_s: float
    _buffer: ReceiveBuffer = field(repr=False)


@dataclass(slots=True, eq=False)
class ReceiveBuffer:
    """Flat byte buckets, uint8 [N] each. ``manifest`` describes the version in them, once it is complete.

    ``tensors`` are views into them, laid out by ``specs``; versions that share a layout share the views.
    """

    buckets: list[Tensor]
    manifest: Manifest | None = None
    specs: tuple[TensorSpec, ...] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


class ReceiveBuffers:
    """All buffers. At most ``MAX_BUFFERS`` versions are in memory."""

    MAX_BUFFERS = 3

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._all: list[ReceiveBuffer] = []
        self._writing: ReceiveBuffer | None = None
        self._waiting: ReceivedWeights | None = None
        self._handed_out: ReceivedWeights | None = None
        self._in_use: ReceivedWeights | None = None

    def reserve(self, manifest: Manifest) -> ReceiveBuffer:
        """Return a buffer to receive this version into, until the next ``reserve`` or ``commit``.

        If no other is free, it is the buffer of the version that waits and was not handed out.
        """
        with self._lock:
            buffer = self._pick()
            self._writing = buffer
            buffer.manifest = None
        # Allocate outside the lock: it may take long, and no other thread uses this buffer now.
        if [bucket.numel() for bucket in buffer.buckets] != list(manifest.bucket_sizes):
            import torch

            buffer.buckets.clear()
            buffer.buckets += [
                torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for size in manifest.bucket_sizes
            ]
            buffer.specs = None
        if buffer.specs != manifest.tensors:
            buffer.tensors = tensor_views(manifest, buffer.buckets)
            buffer.specs = manifest.tensors
        return buffer

    def _pick(self) -> ReceiveBuffer:
        if self._writing is not None:
            return self._writing
        taken = [staged._buffer for staged in (self._waiting, self._handed_out, self._in_use) if staged is not None]
        for buffer in self._all:
            if not any(buffer is other for other in taken):
                return buffer
        if len(self._all) < self.MAX_BUFFERS:
            self._all.append(ReceiveBuffer([]))
            return self._all[-1]
        # All three hold a version, so one of them waits, and only that may be overwritten.
        assert self._waiting is not None
        waiting, self._waiting = self._waiting, None
        return waiting._buffer

    def commit(self, buffer: ReceiveBuffer, manifest: Manifest, receive_s: float) -> ReceivedWeights:
        """Record that ``buffer`` holds the whole version, verified. It now waits to be activated.

        Raises:
            WeightsError: the buffer is not the reserved one.
        """
        staged = ReceivedWeights(
            manifest.lineage, manifest.version, manifest.digest, buffer.tensors, manifest, receive_s, buffer
        )
        with self._lock:
            if self._writing is not buffer:
                raise WeightsError(
                    "expected the reserved buffer to be committed, got another; this is a bug in async-rl, please "
                    "report it"
                )
            self._writing = None
            buffer.manifest = manifest
            self._waiting = staged
        return staged

    def newest(self, lineage: str) -> ReceivedWeights | None:
        """Return the newest verified version of this lineage that is not in use. Its bytes are not overwritten."""
        with self._lock:
            if self._waiting is not None and self._waiting.lineage == lineage:
                self._handed_out, self._waiting = self._waiting, None
            if self._handed_out is not None and self._handed_out.lineage == lineage:
                return self._handed_out
            return None

    def activated(self, received: ReceivedWeights) -> None:
        """Record that ``received`` is in use now. The buffer of the version before is free.

        Raises:
            WeightsError: ``newest`` returned another version later, so the bytes may be overwritten already.
        """
        with self._lock:
            if received is self._in_use:
                return
            if received is not self._handed_out:
                raise WeightsError(
                    f"version {received.version} was activated after poll() had returned a newer version, so its "
                    f"buffer may be overwritten; activate only the version that poll() returned last"
                )
            self._in_use, self._handed_out = received, None

    def holds(self, manifest: Manifest) -> bool:
        """Whether this very version is in memory, verified."""
        key = (manifest.lineage, manifest.version, manifest.digest)
        return any((s.lineage, s.version, s.digest) == key for s in self._held())

    def newest_digest(self) -> str:
        """Return the digest of the newest version in memory; empty if there is none."""
        return next((staged.digest for staged in self._held()), "")

    def find(self, digest: str) -> list[Tensor] | None:
        """Return the buckets of the version with this digest, which the transfer thread may read until ``reserve``."""
        return next((staged._buffer.buckets for staged in self._held() if staged.digest == digest), None)

    def _held(self) -> list[ReceivedWeights]:
        """Newest first."""
        with self._lock:
            return [s for s in (self._waiting, self._handed_out, self._in_use) if s is not None]


def tensor_views(manifest: Manifest, buckets: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return a view into the buckets for each tensor name, with the tensor's dtype and shape."""
    import torch

    views: dict[str, Tensor] = {}
    for spec in manifest.tensors:
        raw = buckets[spec.bucket][spec.offset : spec.offset + spec.size_bytes]
        views[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
    return views


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
            reason = f"can't allocate {manifest.size_bytes} bytes of host memory for the weights: {error}"
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
            raise WeightsError(
                f"expected a transport of {list(TRANSPORTS)} from the learner, got {transport!r}; install the same "
                f"async-rl version on all machines"
            )
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
