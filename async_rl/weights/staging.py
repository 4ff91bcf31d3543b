"""Bounded host memory on learner rank 0 that holds whole versions while they are sent.

``Staging.stage`` runs on the main thread between steps: it consumes the engine's gathered tensors one by one, copies
them into flat buckets (pinned where there is CUDA) and digests each bucket. The buckets are shared memory, which the
stream server reads, so nothing is copied between the two processes. The publisher pins a version while it sends it, and
retires it when a newer one is published; a buffer that is neither pinned nor current is used for the next version.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Layout, LayoutPlan, Manifest, TensorSpec, digest_bytes

_TICK_S = 1.0
_DEFAULT_NUM_VERSIONS = 2
_DEFAULT_NUM_PULLED_VERSIONS = 3
_PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


class SharedBuckets:
    """An anonymous file of buckets. Bucket ``i`` has ``sizes[i]`` bytes at the page-aligned ``offsets[i]``.

    Another process may map it through its descriptor. The kernel frees it when the last process that holds it ends,
    even if that is killed; no file is left under ``/dev/shm``.
    """

    def __init__(self) -> None:
        self.fd = _anonymous_file()
        self.sizes: list[int] = []
        self.offsets: list[int] = []
        self._end = 0

    def append(self, size: int) -> mmap.mmap:
        """Add a bucket. Returns its memory, writable, at least one byte long."""
        offset, mapped = self._end, max(1, size)
        self._end += -(-mapped // _PAGE_BYTES) * _PAGE_BYTES
        os.ftruncate(self.fd, self._end)
        view = mmap.mmap(self.fd, mapped, offset=offset)
        self.sizes.append(size)
        self.offsets.append(offset)
        return view

    def close(self) -> None:
        """Close the descriptor. Existing mappings stay valid."""
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("async-rl-weights", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # a system without memfd
        return os.dup(file.fileno())


@dataclass(slots=True, eq=False)
class _Slot:
    """The buffers of one version and their state. The staging's condition guards it."""

    number: int
    memory: SharedBuckets
    buckets: list[Tensor]
    order: int = 0
    pins: int = 0
    busy: bool = False
    retired: bool = True
    delivered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    """A version in host memory. ``buckets``: uint8 [N] each, read-only while pinned.

    ``wait_s`` is the time spent waiting for a free buffer, ``stage_s`` the time of gathering, copying and digesting.
    ``num_buffers`` is how many versions can be staged at once.
    """

    manifest: Manifest
    wait_s: float
    stage_s: float
    num_buffers: int
    _slot: _Slot = field(repr=False)
    _order: int = field(repr=False)
    _changed: threading.Condition = field(repr=False)

    @property
    def buckets(self) -> tuple[Tensor, ...]:
        return tuple(self._slot.buckets)

    @property
    def slot(self) -> int:
        """The buffer's number. Versions that use the same buffer, one after the other, have the same."""
        return self._slot.number

    @property
    def memory(self) -> SharedBuckets:
        """The same bytes, for another process to map; valid while ``is_intact``."""
        return self._slot.memory

    @property
    def is_intact(self) -> bool:
        """Whether the buffer still holds this version. Check it after reading without a pin."""
        with self._changed:
            return self._slot.order == self._order and not self._slot.busy

    def pin(self) -> bool:
        """Keep the bytes until ``unpin``. Returns False if a newer version has overwritten them already."""
        with self._changed:
            if self._slot.order != self._order or self._slot.busy:
                return False
            self._slot.pins += 1
            return True

    def unpin(self) -> None:
        with self._changed:
            self._slot.pins -= 1
            self._changed.notify_all()

    def retire(self) -> None:
        """Allow reuse of the buffer once it is not pinned, because a newer version is published."""
        with self._changed:
            if self._slot.order == self._order:
                self._slot.retired = True
                self._changed.notify_all()

    def mark_delivered(self, delivered: bool) -> None:
        """Allow reuse of the buffer if no other is free: no member waits for it. Late members get the next version."""
        with self._changed:
            if self._slot.order == self._order:
                self._slot.delivered = delivered
                self._changed.notify_all()


class Staging:
    """All buffers.

    Args:
        staging_bytes: host memory for versions. None: two versions, whatever their size (three if pulled).
        bucket_bytes: target size of a bucket.
        deadline_s: how long ``stage`` waits for a buffer before it discards a version that waits to be sent.
        is_pulled: generators pull versions, each at its own pace. ``stage`` then discards at once a version that it
            would wait for, and keeps the version before as long as it can (deltas start from it).
        min_versions: refuse ``staging_bytes`` with room for fewer versions.
    """

    def __init__(
        self,
        staging_bytes: int | None,
        bucket_bytes: int,
        *,
        deadline_s: float = 60.0,
        is_pulled: bool = False,
        min_versions: int = 1,
    ) -> None:
        self._staging_bytes = staging_bytes
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._is_pulled = is_pulled
        self._min_versions = min_versions
        self._layout: Layout | None = None
        self._slots: list[_Slot] = []
        self._order = 0
        self._num_dropped = 0
        self._changed = threading.Condition()

    @property
    def num_dropped(self) -> int:
        """Number of versions that were discarded unsent because a newer one needed their buffer."""
        return self._num_dropped

    def stage(
        self,
        lineage: str,
        version: int,
        named_tensors: Iterator[tuple[str, Tensor]],
        *,
        tick: Callable[[], None] | None = None,
    ) -> StagedVersion:
        """Copy a version into a buffer. Once begun, the iterator is exhausted even after an error: it runs collectives.

        Args:
            named_tensors: on host or device, with the same names, dtypes and shapes in the same order each time.
            tick: called about every second while waiting for a buffer, before the first tensor is taken.

        Raises:
            WeightsError: one version is larger than ``weights.staging_bytes``; a tensor differs from the version
                before; or every buffer is still being sent after the deadline.
        """
        start = time.monotonic()
        slot = self._claim(tick)
        claimed = time.monotonic()
        iterator = iter(named_tensors)
        try:
            if self._layout is None:
                self._layout = self._stage_first(slot, iterator)
            else:
                self._stage_again(slot, self._layout, iterator)
            _wait_for_copies()
        except BaseException:
            self._hand_back(slot)
            raise
        finally:
            for _ in iterator:
                pass
        layout = self._layout
        digests = tuple(digest_bytes(bucket.numpy().data) for bucket in slot.buckets)
        with self._changed:
            self._order += 1
            slot.order, slot.busy, slot.retired, slot.delivered = self._order, False, False, False
        manifest = Manifest(lineage, version, layout.tensors, layout.bucket_sizes, digests)
        return StagedVersion(
            manifest, claimed - start, time.monotonic() - claimed, self._num_slots(), slot, slot.order, self._changed
        )  # fmt: skip

    def _claim(self, tick: Callable[[], None] | None) -> _Slot:
        """Return a slot that is free; after the deadline, the oldest that is not being sent."""
        give_up = time.monotonic() + self._deadline_s
        # A send has the same deadline, which may have begun just before this one.
        fail_at = give_up + self._deadline_s
        while True:
            with self._changed:
                slot = self._free_slot(expired=self._is_pulled or time.monotonic() >= give_up)
                if slot is None and time.monotonic() < fail_at:
                    until = give_up if time.monotonic() < give_up else fail_at
                    self._changed.wait(min(_TICK_S, max(0.0, until - time.monotonic())))
                    slot = self._free_slot(expired=False)
                if slot is not None:
                    slot.busy = True
                    return slot
            if time.monotonic() >= fail_at:
                raise WeightsError(
                    f"expected a free staging buffer within {self._deadline_s:.1f} s (weights.deadline_s), but all "
                    f"{len(self._slots)} are still being sent; raise weights.staging_bytes"
                )
            if tick is not None:
                tick()

    def _free_slot(self, *, expired: bool) -> _Slot | None:
        unpinned = [s for s in self._slots if s.pins == 0 and not s.busy]
        free = [s for s in unpinned if s.retired]
        has_room = len(self._slots) < self._num_slots()
        if free and not (has_room and self._is_pulled):
            return min(free, key=lambda s: s.order)
        if has_room:
            slot = _Slot(len(self._slots), SharedBuckets(), [])
            if self._layout is not None:
                slot.buckets += [_host_bucket(slot.memory, size) for size in self._layout.bucket_sizes]
            self._slots.append(slot)
            return slot
        delivered = [s for s in unpinned if s.delivered]
        if delivered:
            return min(delivered, key=lambda s: s.order)
        if expired and unpinned:
            self._num_dropped += 1
            return min(unpinned, key=lambda s: s.order)
        return None

    def _num_slots(self) -> int:
        if self._layout is None:
            return 1
        if self._staging_bytes is None:
            return _DEFAULT_NUM_PULLED_VERSIONS if self._is_pulled else _DEFAULT_NUM_VERSIONS
        return max(1, self._staging_bytes // max(1, self._layout.size_bytes))

    def _hand_back(self, slot: _Slot) -> None:
        with self._changed:
            # With a new order, no StagedVersion refers to this slot any more.
            self._order += 1
            slot.order, slot.busy, slot.retired = self._order, False, True
            if self._layout is None:
                slot.buckets.clear()
                slot.memory.close()
                slot.memory = SharedBuckets()
            self._changed.notify_all()

    def _stage_first(self, slot: _Slot, named_tensors: Iterator[tuple[str, Tensor]]) -> Layout:
        """Fill each bucket in a scratch buffer, then copy it at its exact size, since sizes are not known yet."""
        plan = LayoutPlan(self._bucket_bytes)
        limit = None if self._staging_bytes is None else self._staging_bytes // self._min_versions
        scratch = torch.zeros(0, dtype=torch.uint8)
        for name, tensor in named_tensors:
            spec = plan.place(name, _dtype_name(tensor), tuple(tensor.shape))
            if limit is not None and plan.layout_bytes > limit:
                continue  # Only count, so that the message can name the whole size.
            if spec.bucket > len(slot.buckets):
                slot.buckets.append(_exact_bucket(slot.memory, scratch, plan.bucket_size(spec.bucket - 1)))
                scratch.zero_()
            if scratch.numel() < spec.size_bytes or scratch.numel() == 0:
                scratch = torch.zeros(max(self._bucket_bytes, spec.size_bytes), dtype=torch.uint8)
            _fill(scratch, spec, tensor)
        layout = plan.layout
        if limit is not None and layout.size_bytes > limit:
            least = self._min_versions * layout.size_bytes
            raise WeightsError(
                f"weights.staging_bytes: expected at least {least}, since one version has {layout.size_bytes} bytes, "
                f"got {self._staging_bytes}; set at least {least}, or {max(2, self._min_versions) * layout.size_bytes} "
                f"to send one version while the next is staged"
            )
        if layout.bucket_sizes:
            slot.buckets.append(_exact_bucket(slot.memory, scratch, layout.bucket_sizes[-1]))
        return layout

    def _stage_again(self, slot: _Slot, layout: Layout, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        index = -1
        for index, (name, tensor) in enumerate(named_tensors):
            spec = layout.tensors[index] if index < len(layout.tensors) else None
            got = (name, _dtype_name(tensor), tuple(tensor.shape))
            if spec is None or got != (spec.name, spec.dtype, spec.shape):
                wanted = "no more tensors" if spec is None else f"{(spec.name, spec.dtype, spec.shape)}"
                raise WeightsError(
                    f"tensor {index} of the weights: expected {wanted}, as in the version before, got {got}"
                )
            _fill(slot.buckets[spec.bucket], spec, tensor)
        if index + 1 != len(layout.tensors):
            raise WeightsError(f"expected {len(layout.tensors)} tensors, as in the version before, got {index + 1}")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _host_bucket(memory: SharedBuckets, size: int) -> Tensor:
    """Return zeros, uint8 [size], at the end of ``memory``; registered with CUDA if available."""
    bucket = torch.frombuffer(memory.append(size), dtype=torch.uint8)
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()
        status = cudart.cudaHostRegister(bucket.data_ptr(), bucket.numel(), 0)
        if int(status) != 0:
            raise WeightsError(
                f"can't pin {size} bytes of staging memory (CUDA error {int(status)}); raise the limit on locked "
                f"memory (ulimit -l)"
            )
    return bucket[:size]


def _exact_bucket(memory: SharedBuckets, scratch: Tensor, size: int) -> Tensor:
    bucket = _host_bucket(memory, size)
    _wait_for_copies()
    bucket.copy_(scratch[:size])
    return bucket


def _fill(bucket: Tensor, spec: TensorSpec, tensor: Tensor) -> None:
    """Copy ``tensor``'s bytes to its place. A copy from a device ends with ``_wait_for_copies``."""
    source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    bucket[spec.offset : spec.offset + spec.size_bytes].copy_(source, non_blocking=True)


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
