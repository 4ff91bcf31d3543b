"""The generator's side of ``gloo`` and ``nccl``: one rank of the epoch's communicator, kept between transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.weights import control
from async_rl.weights.buffers import Buffer, Buffers
from async_rl.weights.manifest import Manifest
from async_rl.weights.transport import Filled, bucket_received

if TYPE_CHECKING:
    from async_rl.weights.collective.communicator import CollectiveGroup


@dataclass(frozen=True, slots=True)
class CollectiveOrder:
    """``host`` is the publisher's, ``local_host`` an address of this machine at which the other ranks reach it: of
    interest where a communicator is built.
    """

    go: control.Go
    host: str
    local_host: str


class CollectiveInlet:
    """See ``transport.Inlet``. ``device`` is this generator's CUDA device, for ``nccl``."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._group: CollectiveGroup | None = None
        self._epoch = -1

    def fill(
        self, order: CollectiveOrder, manifest: Manifest, buffer: Buffer, buffers: Buffers, *, deadline: float
    ) -> Filled:
        """Every bucket, through the epoch's communicator, which is built first if it is a new one."""
        from async_rl.weights.collective.communicator import CollectiveGroup

        go = order.go
        if go.store_port:
            self.close()
            self._group = CollectiveGroup.create(
                go.backend,
                store_host=order.host,
                store_port=go.store_port,
                rank=go.rank,
                size=go.size,
                stall_s=go.stall_s,
                local_host=order.local_host,
                device=self._device,
            )
            self._epoch = go.epoch
        if self._group is None or self._epoch != go.epoch:
            raise WeightsError(f"expected the communicator of epoch {go.epoch} to be here still, got {self._epoch}")
        digests: list[str] = []
        for bucket in buffer.buckets:
            hasher = xxhash.xxh3_128()
            self._group.broadcast(
                bucket, chunk_bytes=go.chunk_bytes, deadline=deadline, done=lambda c, h=hasher: h.update(c.numpy().data)
            )
            digests.append(hasher.hexdigest())
            bucket_received()
        # All of them first: a rank that leaves in between would break the collective for the others.
        _check_digests(digests, manifest)
        return Filled(manifest.size_bytes)

    def close(self) -> None:
        group, self._group = self._group, None
        self._epoch = -1
        if group is not None:
            group.close()


def _check_digests(digests: Sequence[str], manifest: Manifest) -> None:
    wrong = [
        f"bucket {index}: expected {expected}, got {got}"
        for index, (got, expected) in enumerate(zip(digests, manifest.bucket_digests, strict=True))
        if got != expected
    ]
    if wrong:
        raise CorruptWeightsError("digest mismatch in " + "; ".join(wrong[:3]))
