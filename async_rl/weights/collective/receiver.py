"""The generator's side of ``nccl`` and ``gloo``: receives the broadcast of a version, and verifies it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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

NUM_DIGEST_THREADS = 4


class CollectiveReceiver:
    """The generator's side of ``nccl`` and ``gloo``. Implements ``transport.TransportReceiver``.

    ``device`` is this generator's CUDA device, which ``nccl`` needs.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._communicator: Communicator | None = None
        self._epoch = -1
        self._threads = [ThreadPoolExecutor(1, "received-digest") for _ in range(NUM_DIGEST_THREADS)]

    def receive(
        self, order: ReceiveOrder[StartCollective], buffer: ReceiveBuffer, buffers: ReceiveBuffers
    ) -> ReceiveResult:
        """Receive every bucket of the version from the learner, and verify the digests. Create the communicator
        if it is new.
        """
        start = order.message
        communicator = self._connect(order)
        buffer.digests[:] = [""] * len(buffer.buckets)
        digests = _Digests(self._threads, [bucket.numel() for bucket in buffer.buckets])
        communicator.broadcast(
            buffer.buckets, chunk_bytes=start.chunk_bytes, deadline=order.deadline, on_chunk=digests.add
        )
        buffer.digests[:] = digests.hex()
        # After the last bucket: a rank that leaves in between breaks the collective for the others.
        _check_digests(buffer.digests, order.manifest)
        return ReceiveResult(order.manifest.size_bytes, verify_s=digests.longest_s)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        self._epoch = -1
        if communicator is not None:
            communicator.close()

    def _connect(self, order: ReceiveOrder[StartCollective]) -> Communicator:
        start = order.message
        if start.unique_id:
            self.close()
            library = make_library(start.transport, Endpoint(order.host, order.local_host, self._device))
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


class _Digests:
    """The digests of a version's buckets, computed as chunks arrive, all of one bucket in one of ``threads``."""

    def __init__(self, threads: Sequence[ThreadPoolExecutor], sizes: Sequence[int]) -> None:
        self._threads, self._thread_of = threads, dealt_out(sizes, len(threads))
        self._hashers = [xxhash.xxh3_128() for _ in sizes]
        self._seconds = [0.0] * len(threads)

    def add(self, bucket: int, chunk: Tensor) -> Future[None]:
        """Let a thread read the next ``chunk`` of ``bucket``."""
        fault_point("generator.receiving")  # a bucket of a version has arrived, the version is not verified
        return self._threads[self._thread_of[bucket]].submit(self._read, bucket, chunk)

    def hex(self) -> list[str]:
        """Return the digest of each bucket. All chunks must have been read."""
        return [hasher.hexdigest() for hasher in self._hashers]

    @property
    def longest_s(self) -> float:
        """The seconds that the busiest thread computed for."""
        return max(self._seconds)

    def _read(self, bucket: int, chunk: Tensor) -> None:
        begin = time.perf_counter()
        self._hashers[bucket].update(chunk.numpy().data)
        self._seconds[self._thread_of[bucket]] += time.perf_counter() - begin


def dealt_out(sizes: Sequence[int], num_threads: int) -> list[int]:
    """Return a thread for each bucket of these ``sizes``: in their order, the one that has the fewest bytes so far."""
    loads, threads = [0] * num_threads, []
    for size in sizes:
        threads.append(loads.index(min(loads)))
        loads[threads[-1]] += size
    return threads


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
