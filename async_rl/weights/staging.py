"""Host memory of learner rank 0 that holds whole versions of the weights while they are sent.

``Staging.stage`` runs on the main thread between two training steps. It takes the engine's gathered tensors one by
one, copies them into flat buckets and computes a digest of each bucket. The buckets are shared memory (pinned if there
is CUDA). The stream server process reads the same memory, so nothing is copied between the two processes. The
publisher pins a version while it sends that version, and retires a version when a newer one is published. A buffer is
reused when it is retired and not pinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Layout, LayoutPlan, Manifest, TensorSpec, digest_bytes
from async_rl.weights.memory import SharedBuckets, host_bucket

_BUG = "this is a bug in async-rl, please report it"
_TICK_S = 1.0
_NUM_DIGEST_THREADS = 8
"""One thread computes about 10 GB/s. Digests release the interpreter's lock."""
_DEFAULT_NUM_VERSIONS = 2
_DEFAULT_NUM_PULLED_VERSIONS = 3


@dataclass(slots=True, eq=False)
class _Slot:
    """Memory for one version, and its state. The staging's condition guards it.

    Attributes:
        number: number of this slot.
        memory: the shared memory.
        buckets: the same memory as tensors, uint8 [N] each.
        order: counts up with every version that is staged, so that it identifies the version in this slot.
        pins: how many transfers read the memory now.
        busy: whether a version is being copied into the memory.
        retired: whether a newer version has been published, or no version is in this slot.
        delivered: whether no member waits for this version.
    """

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
    """A version of the weights in the learner's host memory.

    Attributes:
        manifest: the version's manifest.
        wait_s: seconds that ``Staging.stage`` waited for free memory.
        gather_s: seconds that gathering and copying took.
        digest_s: seconds after that until the last digest was there. Most are computed while other buckets are copied.
        num_buffers: how many versions can be staged at once.
    """

    manifest: Manifest
    wait_s: float
    gather_s: float
    digest_s: float
    num_buffers: int
    _slot: _Slot = field(repr=False)
    _order: int = field(repr=False)
    _changed: threading.Condition = field(repr=False)

    @property
    def buckets(self) -> tuple[Tensor, ...]:
        """The bytes of the version, uint8 [N] for each bucket. Read them only while the version is pinned."""
        return tuple(self._slot.buckets)

    @property
    def slot(self) -> int:
        """Number of the memory that holds this version. A later version that reuses the memory has the same number."""
        return self._slot.number

    @property
    def memory(self) -> SharedBuckets:
        """The shared memory of ``buckets``, for another process to map. It holds this version while ``is_intact``."""
        return self._slot.memory

    @property
    def is_intact(self) -> bool:
        """Whether the memory still holds this version, and no newer one is being copied into it.

        A reader that did not call ``pin`` must check this after it has read. If it is False, the bytes may be wrong.
        """
        with self._changed:
            return self._slot.order == self._order and not self._slot.busy

    def pin(self) -> bool:
        """Keep the bytes of this version until ``unpin``. Return False if a newer version has overwritten them."""
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
        """Record that a newer version is published. The memory of this one may be reused when it is not pinned."""
        with self._changed:
            if self._slot.order == self._order:
                self._slot.retired = True
                self._changed.notify_all()

    def mark_delivered(self, delivered: bool) -> None:
        """Record whether no member waits for this version. If so, its memory may be reused if no other memory is free.

        A member that comes too late for this version gets the next one.
        """
        with self._changed:
            if self._slot.order == self._order:
                self._slot.delivered = delivered
                self._changed.notify_all()


class Staging:
    """The learner's memory for versions of the weights that are being sent.

    Args:
        staging_bytes: host memory for versions. None: room for two versions, or three if generators pull them.
        bucket_bytes: target size of a bucket.
        deadline_s: how long ``stage`` waits for free memory before it overwrites a version that no transfer reads yet.
        is_pulled: generators pull versions, each at its own pace. ``stage`` then overwrites such a version at once, and
            keeps the previous version as long as it can, because deltas are computed from the previous version.
        min_versions: refuse ``staging_bytes`` if there is room for fewer versions.
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
        self.num_dropped = 0
        """Number of versions that a newer version overwrote before every member had them."""
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(_NUM_DIGEST_THREADS, "weights-digest")

    def stage(
        self,
        lineage: str,
        version: int,
        named_tensors: Iterator[tuple[str, Tensor]],
        *,
        tick: Callable[[], None] | None = None,
    ) -> StagedVersion:
        """Copy a version of the weights into free memory, and return it with its manifest.

        All of ``named_tensors`` is consumed once the first tensor was taken, even after an error, because the iterator
        runs collectives of the learner's ranks.

        Args:
            lineage: the lineage of the version.
            version: number of the version.
            named_tensors: the tensors, on host or device. Names, dtypes, shapes and order must be the same each time.
            tick: called about every second while waiting for free memory, before the first tensor is taken.

        Raises:
            WeightsError: a version does not fit into ``weights.staging_bytes``; a tensor differs from the version
                before; or all memory is still being sent after the deadline.
        """
        start = time.monotonic()
        slot = self._claim(tick)
        claimed = time.monotonic()
        iterator = iter(named_tensors)
        digests: list[Future[str]] = []
        try:
            if self._layout is None:
                self._layout = self._stage_first(slot, iterator, digests)
            else:
                self._stage_again(slot, self._layout, iterator, digests)
            _wait_for_copies()
        except BaseException:
            wait(digests)  # they read the memory
            self._hand_back(slot)
            raise
        finally:
            for _ in iterator:
                pass
        layout = self._layout
        copied = time.monotonic()
        bucket_digests = tuple(digest.result() for digest in digests)
        with self._changed:
            self._order += 1
            slot.order, slot.busy, slot.retired, slot.delivered = self._order, False, False, False
        manifest = Manifest(lineage, version, layout.tensors, layout.bucket_sizes, bucket_digests)
        return StagedVersion(
            manifest, claimed - start, copied - claimed, time.monotonic() - copied, self._num_slots(), slot, slot.order,
            self._changed,
        )  # fmt: skip

    def _claim(self, tick: Callable[[], None] | None) -> _Slot:
        """Return a free slot. After the deadline (at once if versions are pulled), take the oldest that no transfer
        reads.
        """
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
                slot.buckets += [host_bucket(slot.memory, size) for size in self._layout.bucket_sizes]
            self._slots.append(slot)
            return slot
        delivered = [s for s in unpinned if s.delivered]
        if delivered:
            return min(delivered, key=lambda s: s.order)
        if expired and unpinned:
            self.num_dropped += 1
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

    def _begin_digest(self, bucket: Tensor) -> Future[str]:
        """Compute the digest of ``bucket`` in another thread, when the copies that have begun so far have ended."""
        event = None
        if torch.cuda.is_available():
            event = torch.cuda.Event()
            event.record()
        return self._pool.submit(_digest, bucket, event)

    def _stage_first(
        self, slot: _Slot, named_tensors: Iterator[tuple[str, Tensor]], digests: list[Future[str]]
    ) -> Layout:
        """Copy the first version into the slot's memory, and return the layout.

        The sizes of the buckets are not known yet, so each bucket is filled in a scratch buffer, then copied at its
        exact size.
        """
        plan = LayoutPlan(self._bucket_bytes)
        limit = None if self._staging_bytes is None else self._staging_bytes // self._min_versions
        scratch = torch.zeros(0, dtype=torch.uint8)
        for name, tensor in named_tensors:
            spec = plan.place(name, _dtype_name(tensor), tuple(tensor.shape))
            if limit is not None and plan.layout_bytes > limit:
                continue  # Only count, so that the message can name the whole size.
            if spec.bucket > len(slot.buckets):
                slot.buckets.append(_exact_bucket(slot.memory, scratch, plan.bucket_size(spec.bucket - 1)))
                digests.append(self._begin_digest(slot.buckets[-1]))
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
            digests.append(self._begin_digest(slot.buckets[-1]))
        return layout

    def _stage_again(
        self, slot: _Slot, layout: Layout, named_tensors: Iterator[tuple[str, Tensor]], digests: list[Future[str]]
    ) -> None:
        index = -1
        for index, (name, tensor) in enumerate(named_tensors):
            spec = layout.tensors[index] if index < len(layout.tensors) else None
            got = (name, _dtype_name(tensor), tuple(tensor.shape))
            if spec is None or got != (spec.name, spec.dtype, spec.shape):
                wanted = "no more tensors" if spec is None else f"{(spec.name, spec.dtype, spec.shape)}"
                raise WeightsError(
                    f"tensor {index} of the weights: expected {wanted}, as in the version before, got {got}; {_BUG}"
                )
            if spec.bucket > len(digests):  # the buckets before it are full
                digests.append(self._begin_digest(slot.buckets[len(digests)]))
            _fill(slot.buckets[spec.bucket], spec, tensor)
        if index + 1 != len(layout.tensors):
            raise WeightsError(
                f"expected {len(layout.tensors)} tensors, as in the version before, got {index + 1}; {_BUG}"
            )
        if slot.buckets:
            digests.append(self._begin_digest(slot.buckets[-1]))


def _digest(bucket: Tensor, copied: torch.cuda.Event | None) -> str:
    if copied is not None:
        copied.synchronize()
    return digest_bytes(bucket.numpy().data)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _exact_bucket(memory: SharedBuckets, scratch: Tensor, size: int) -> Tensor:
    bucket = host_bucket(memory, size)
    _wait_for_copies()
    bucket.copy_(scratch[:size])
    return bucket


def _fill(bucket: Tensor, spec: TensorSpec, tensor: Tensor) -> None:
    """Copy the bytes of ``tensor`` to its place in ``bucket``. Call ``_wait_for_copies`` before reading them."""
    source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    bucket[spec.offset : spec.offset + spec.size_bytes].copy_(source, non_blocking=True)


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
