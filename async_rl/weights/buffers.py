"""A generator's host buffers for versions: one in use, one verified and waiting, one being received.

Main thread and transfer thread both call; a lock guards the states. A buffer that was handed out (``newest``) or is in
use (``activated``) is never written to. Buffers are made when they are first needed: two in the common case, three
when versions come faster than they are activated. torch is imported when the first is made.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StagedWeights:
    """A verified version in host memory. ``tensors`` are views, valid until a later version's ``activated``.

    ``receive_s`` is the time its transfer took; decoding went on meanwhile.
    """

    lineage: str
    version: int
    digest: str
    tensors: Mapping[str, Any]
    manifest: Manifest
    receive_s: float
    _buffer: Buffer = field(repr=False)


@dataclass(slots=True, eq=False)
class Buffer:
    """Flat byte buckets, uint8 [N] each; ``manifest`` is the version that is in them, once all of it is.

    ``tensors`` are views into them, laid out by ``specs``: made once, for versions seldom differ in their layout.
    """

    buckets: list[Tensor]
    manifest: Manifest | None = None
    specs: tuple[TensorSpec, ...] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Buffers:
    """The rotation. At most ``MAX_BUFFERS`` versions are ever in memory."""

    MAX_BUFFERS = 3

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._all: list[Buffer] = []
        self._writing: Buffer | None = None
        self._waiting: StagedWeights | None = None
        self._handed_out: StagedWeights | None = None
        self._in_use: StagedWeights | None = None

    def reserve(self, manifest: Manifest) -> Buffer:
        """A buffer to receive this version into, until the next ``reserve`` or ``commit``.

        Where no other is free, the version that waits and was not handed out gives up its buffer.
        """
        with self._lock:
            buffer = self._pick()
            self._writing = buffer
            buffer.manifest = None
        # Outside the lock: allocating may take long, and nobody else touches this buffer any more.
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

    def _pick(self) -> Buffer:
        if self._writing is not None:
            return self._writing
        taken = [staged._buffer for staged in (self._waiting, self._handed_out, self._in_use) if staged is not None]
        for buffer in self._all:
            if not any(buffer is other for other in taken):
                return buffer
        if len(self._all) < self.MAX_BUFFERS:
            self._all.append(Buffer([]))
            return self._all[-1]
        # All three hold a version, so one of them is the waiting one, and only it may be overwritten.
        assert self._waiting is not None
        waiting, self._waiting = self._waiting, None
        return waiting._buffer

    def commit(self, buffer: Buffer, manifest: Manifest, receive_s: float) -> StagedWeights:
        """All of the version is in ``buffer`` and matches its digests: it waits to be activated.

        Raises:
            WeightsError: the buffer is not the reserved one.
        """
        staged = StagedWeights(
            manifest.lineage, manifest.version, manifest.digest, buffer.tensors, manifest, receive_s, buffer
        )
        with self._lock:
            if self._writing is not buffer:
                raise WeightsError("a buffer was committed that is not the reserved one")
            self._writing = None
            buffer.manifest = manifest
            self._waiting = staged
        return staged

    def newest(self, lineage: str) -> StagedWeights | None:
        """The newest verified version of this lineage that is not in use; it is handed out, so its bytes stay."""
        with self._lock:
            if self._waiting is not None and self._waiting.lineage == lineage:
                self._handed_out, self._waiting = self._waiting, None
            if self._handed_out is not None and self._handed_out.lineage == lineage:
                return self._handed_out
            return None

    def activated(self, staged: StagedWeights) -> None:
        """``staged`` is in use now; the buffer of the one before is free.

        Raises:
            WeightsError: it was not handed out last, so its bytes may be gone already.
        """
        with self._lock:
            if staged is self._in_use:
                return
            if staged is not self._handed_out:
                raise WeightsError(
                    f"version {staged.version} was activated after its buffer was given up; activate what poll() "
                    f"returned last"
                )
            self._in_use, self._handed_out = staged, None

    def holds(self, manifest: Manifest) -> bool:
        """Whether this very version is here, verified."""
        key = (manifest.lineage, manifest.version, manifest.digest)
        return any((s.lineage, s.version, s.digest) == key for s in self._held())

    def newest_digest(self) -> str:
        """Digest of the weights that came last and are still here; empty without any."""
        return next((staged.digest for staged in self._held()), "")

    def find(self, digest: str) -> list[Tensor] | None:
        """The buckets of the weights with this digest. The transfer thread may read them until its next ``reserve``."""
        return next((staged._buffer.buckets for staged in self._held() if staged.digest == digest), None)

    def _held(self) -> list[StagedWeights]:
        """Newest first."""
        with self._lock:
            return [s for s in (self._waiting, self._handed_out, self._in_use) if s is not None]


def tensor_views(manifest: Manifest, buckets: Sequence[Tensor]) -> dict[str, Tensor]:
    """Name -> view into the buckets, in its dtype and shape."""
    import torch

    views: dict[str, Tensor] = {}
    for spec in manifest.tensors:
        raw = buckets[spec.bucket][spec.offset : spec.offset + spec.size_bytes]
        views[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
    return views
