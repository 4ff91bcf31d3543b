"""The generator's host memory, into which versions of the weights are received.

``ReceiveBuffers`` holds up to three versions: one in use, one verified and waiting, one being received. The main thread
and the transfer thread both call it, and a lock guards its state. Only the transfer thread writes to buffers. A buffer
that ``newest`` returned, or that is in use, is never written to. Buffers are allocated when first needed: usually two,
and a third if versions come faster than they are activated. torch is imported with the first buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_rl.errors import WeightsError
from async_rl.weights.manifest import ALIGNMENT, Manifest, TensorSpec
from async_rl.weights.memory import own_memory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedWeights:
    """A verified version of the weights in host memory.

    Attributes:
        lineage: the lineage of the version, as in ``Manifest``.
        version: number of the version.
        digest: digest of the weights, as in ``Manifest``.
        tensors: the tensors by name. They are views into a buffer, valid until a later version is ``activated``.
        manifest: the manifest against which the bytes were verified.
        receive_s: seconds that the transfer took. Decoding continued during that time.
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
    """Memory for one version of the weights.

    Attributes:
        buckets: the bytes, one uint8 [N] tensor for each bucket of the layout.
        digests: digest of each bucket's bytes. Empty for a bucket whose bytes are not verified.
        manifest: manifest of the version that the buckets hold. None while no complete version is in them.
        specs: the layout for which ``tensors`` was made. None before the first version.
        tensors: tensors by name, as views into ``buckets``. Versions with the same layout share the views.
        in_engine: this buffer stands for memory of the engine's workers. There are no ``buckets`` here, and ``tensors``
            is a ``HeldByEngine``.
        memory: the bytes from which the buckets are cut if they fit in, uint8 [N] on any device. If they don't, they
            are allocated on that device.
    """

    buckets: list[Tensor]
    digests: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    specs: tuple[TensorSpec, ...] | None = None
    tensors: Mapping[str, Any] = field(default_factory=dict)
    in_engine: bool = False
    memory: Tensor | None = None

    def fit(self, manifest: Manifest, *, pinned: bool = False) -> bool:
        """Make buckets and views fit the layout of ``manifest``. Return whether the bytes that were there are gone."""
        fits = [bucket.numel() for bucket in self.buckets] == list(manifest.bucket_sizes)
        if not fits:
            self.buckets.clear()
            self.tensors = {}  # the memory of before can go first
            self.buckets += _allocate(manifest.bucket_sizes, self.memory, pinned=pinned)
            self.digests[:] = [""] * len(manifest.bucket_sizes)
            self.specs = None
        if self.specs != manifest.tensors:
            self.tensors = tensor_views(manifest, self.buckets)
            self.specs = manifest.tensors
        return not fits


def _allocate(sizes: Sequence[int], memory: Tensor | None, *, pinned: bool) -> list[Tensor]:
    """Return buckets of these sizes in bytes, uint8 [N] each. ``memory`` as in ``ReceiveBuffer``."""
    import torch

    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    if memory is not None and sum(padded) > memory.numel():
        return [torch.empty(size, dtype=torch.uint8, device=memory.device) for size in sizes]
    whole = own_memory(sum(padded), pinned=pinned) if memory is None else memory[: sum(padded)]
    return [piece[:size] for piece, size in zip(whole.split(padded), sizes, strict=True)]


class ReceiveBuffers:
    """The generator's memory for received versions. It holds at most ``MAX_BUFFERS`` versions.

    The engine's workers may hold one more. They receive it by a collective into a single buffer, and copy it into the
    model when it is activated. So nothing is received there while a version is being activated, and no version is
    returned for activation while something is received there.
    """

    MAX_BUFFERS = 3

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._activated = threading.Condition(self._lock)
        self._engine_buffer = ReceiveBuffer([], in_engine=True)
        self._all: list[ReceiveBuffer] = []
        self._writing: ReceiveBuffer | None = None
        self._waiting: ReceivedWeights | None = None
        self._handed_out: ReceivedWeights | None = None
        self._in_use: ReceivedWeights | None = None

    def reserve(self, manifest: Manifest) -> ReceiveBuffer:
        """Return the buffer into which the transfer thread may receive the version of ``manifest``.

        The buffer stays reserved until the next ``commit``. If all buffers are taken, the version that waits and that
        ``newest`` has not returned is overwritten.
        """
        with self._lock:
            buffer = self._pick()
            self._writing = buffer
            buffer.manifest = None
        # Allocate outside the lock: it may take long, and no other thread uses this buffer now.
        buffer.fit(manifest, pinned=self._pinned)
        return buffer

    def reserve_engine(self, timeout_s: float) -> ReceiveBuffer:
        """Return the buffer that stands for the engine's memory, when no version is being activated. See ``reserve``.

        Raises:
            WeightsError: a version is still being activated after ``timeout_s``.
        """
        with self._activated:
            if not self._activated.wait_for(lambda: self._handed_out is None, timeout_s):
                raise WeightsError(
                    f"the engine took more than {timeout_s:.0f} s to activate a version, so this one is pulled"
                )
            if self._waiting is not None and self._waiting._buffer.in_engine:
                self._waiting = None
            self._writing = self._engine_buffer
        return self._engine_buffer

    def abandon_engine(self) -> None:
        """Record that nothing is being received into the engine any more."""
        with self._lock:
            if self._writing is self._engine_buffer:
                self._writing = None

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
        """Record that ``buffer`` now holds the complete, verified version of ``manifest``. Return that version.

        It is the one that ``newest`` returns next.

        Raises:
            WeightsError: ``buffer`` is not the one that ``reserve`` returned.
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
        """Return the newest verified version of this lineage that is not in use yet. None if there is none.

        The version's buffer is not overwritten until a newer version is returned.
        """
        with self._lock:
            if self._writing is self._engine_buffer:
                return None
            if self._waiting is not None and self._waiting.lineage == lineage:
                self._handed_out, self._waiting = self._waiting, None
            if self._handed_out is not None and self._handed_out.lineage == lineage:
                return self._handed_out
            return None

    def activated(self, received: ReceivedWeights) -> None:
        """Record that the engine uses ``received`` now. The buffer of the version that was in use before becomes free.

        Raises:
            WeightsError: ``newest`` has returned another version since, so the bytes of ``received`` may be
                overwritten.
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
            self._activated.notify_all()

    def holds(self, manifest: Manifest) -> bool:
        """Return whether the version with this lineage, number and digest is in memory and verified."""
        key = (manifest.lineage, manifest.version, manifest.digest)
        return any((s.lineage, s.version, s.digest) == key for s in self._held())

    def newest_digest(self) -> str:
        """Return the digest of the newest version in memory. Empty if there is none."""
        return next((staged.digest for staged in self._held()), "")

    def find(self, digest: str) -> list[Tensor] | None:
        """Return the buckets of the version with this digest. None if it is not in memory.

        The transfer thread may read them until its next ``reserve``.
        """
        here = [staged for staged in self._held() if not staged._buffer.in_engine]
        return next((staged._buffer.buckets for staged in here if staged.digest == digest), None)

    def _held(self) -> list[ReceivedWeights]:
        """Return the versions in memory, the newest first."""
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
