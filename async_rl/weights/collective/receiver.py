"""The generator's side of ``nccl`` and ``gloo``: receives the broadcast of a version, and verifies it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import xxhash
from torch import Tensor

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.process.fault_points import fault_point
from async_rl.weights.collective.libraries import make_library
from async_rl.weights.collective.library import Communicator, Endpoint
from async_rl.weights.control import StartCollective
from async_rl.weights.manifest import Manifest
from async_rl.weights.receive_buffers import ReceiveBuffer, ReceiveBuffers
from async_rl.weights.transport import ReceiveOrder, ReceiveResult


class CollectiveReceiver:
    """The generator's side of ``nccl`` and ``gloo``. Implements ``transport.TransportReceiver``.

    ``device`` is this generator's CUDA device, which ``nccl`` needs.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._communicator: Communicator | None = None
        self._epoch = -1

    def receive(
        self, order: ReceiveOrder[StartCollective], buffer: ReceiveBuffer, buffers: ReceiveBuffers
    ) -> ReceiveResult:
        """Receive every bucket of the version from the learner, and verify the digests. Create the communicator
        if it is new.
        """
        start = order.message
        communicator = self._connect(order)
        buffer.digests[:] = [""] * len(buffer.buckets)
        hasher, verify_s = xxhash.xxh3_128(), 0.0

        def verify(chunk: Tensor) -> None:
            nonlocal verify_s
            begin = time.perf_counter()
            hasher.update(chunk.numpy().data)
            verify_s += time.perf_counter() - begin

        for index, bucket in enumerate(buffer.buckets):
            hasher.reset()
            communicator.broadcast(bucket, chunk_bytes=start.chunk_bytes, deadline=order.deadline, on_chunk=verify)
            buffer.digests[index] = hasher.hexdigest()
            fault_point("generator.receiving")
        # After the last bucket: a rank that leaves in between breaks the collective for the others.
        _check_digests(buffer.digests, order.manifest)
        return ReceiveResult(order.manifest.size_bytes, verify_s=verify_s)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        self._epoch = -1
        if communicator is not None:
            communicator.close()

    def _connect(self, order: ReceiveOrder[StartCollective]) -> Communicator:
        start = order.message
        if start.unique_id:
            self.close()
            library = make_library(start.transport, Endpoint(order.host, order.local_host, device=self._device))
            self._communicator = Communicator.connect(
                library, start.unique_id, rank=start.rank, size=start.size, stall_s=start.stall_s
            )
            self._epoch = start.epoch
        if self._communicator is None or self._epoch != start.epoch:
            raise WeightsError(
                f"expected the communicator of epoch {start.epoch}, got that of epoch {self._epoch}; the "
                f"learner offers the version again"
            )
        return self._communicator


def _check_digests(digests: Sequence[str], manifest: Manifest) -> None:
    wrong = [
        f"bucket {index}: expected {expected}, got {got}"
        for index, (got, expected) in enumerate(zip(digests, manifest.bucket_digests, strict=True))
        if got != expected
    ]
    if wrong:
        raise CorruptWeightsError(
            f"the received bytes do not match their digests: {'; '.join(wrong[:3])}; the learner offers the version "
            f"again; if this repeats, check the network and the memory of both machines"
        )
