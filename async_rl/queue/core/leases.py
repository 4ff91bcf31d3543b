"""The table of the leases in flight, which also remembers those that have ended. All times are in seconds."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from async_rl.queue.core.failures import EvalKey
from async_rl.queue.storage.journal import Changes
from async_rl.records import Lease

_REMEMBERED = 65_536
"""Number of ended leases that are kept, so that a group that is returned again differs from one for an unknown
lease."""


class LeaseRecord(msgspec.Struct, frozen=True, gc=False):
    """A lease in flight as the journal stores it: all that can't be computed from the config and the dataset rows.

    The progress is not stored. After a restart of the server, the progress of every lease starts at 0.
    """

    position: int
    min_version: int
    lineage: str
    attempt: int
    generator_id: str
    version: int
    issued_at: float
    evaluation: tuple[str, int] | None


@dataclass(slots=True)
class ActiveLease:
    """A lease that a generator is sampling.

    Attributes:
        lease: the lease as the generator got it.
        generator_id: the generator that has the lease.
        version: the generator's active weights version when it requested the lease.
        reserved: the number of bytes of ``queue.max_bytes`` that are reserved for the group.
        issued_at: the time at which the lease was granted.
        grown_at: the last time at which ``progress`` grew.
        progress: the number of sampled tokens that the generator reported last.
        evaluation: the dataset and step of the evaluation; None for a training lease.
        since: the number of outcomes (``QueueState.num_outcomes``) when it was granted; 0 after a restart.
    """

    lease: Lease
    generator_id: str
    version: int
    reserved: int
    issued_at: float
    grown_at: float
    progress: int = 0
    evaluation: tuple[str, int] | None = None
    since: int = 0

    @property
    def key(self) -> tuple[EvalKey | None, int]:
        """What is sampled: the evaluation and its row, or None and the position of a training prompt."""
        prompt = self.lease.prompt
        return self.evaluation, prompt.position if self.evaluation is None else prompt.row

    @property
    def oldest_version(self) -> int:
        """The oldest weights version that may sample a token of this lease."""
        return max(self.version, self.lease.min_version)

    @property
    def counted_progress(self) -> int:
        """``progress``, but no more than the lease allows: it is the generator's word, and sums are made of it."""
        return min(self.progress, self.lease.group_size * self.lease.sampling.max_new_tokens)

    def record(self) -> LeaseRecord:
        lease = self.lease
        return LeaseRecord(
            lease.prompt.position, lease.min_version, lease.lineage, lease.attempt, self.generator_id, self.version,
            self.issued_at, self.evaluation,
        )  # fmt: skip


class ClosedLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that ended. ``status`` is ``"returned"``, or the cause for which the lease was dropped.

    ``number`` is the number of leases that had ended by then. The lease with the lowest number is removed first.
    """

    status: str
    number: int


class LeaseTable:
    """The leases in flight, by lease id. A lease expires when its progress has not grown for ``timeout_s`` seconds.

    Attributes:
        timeout_s: see above.
        reserved: the sum of the bytes reserved for the groups of these leases.
        num_training: the number of training leases in flight.
        num_held: their number by generator.
    """

    def __init__(self, timeout_s: float, changes: Changes) -> None:
        self.timeout_s, self._changes = timeout_s, changes
        self._active: dict[str, ActiveLease] = {}
        self._closed: OrderedDict[str, ClosedLease] = OrderedDict()
        self._by_version: list[tuple[int, str]] = []
        self.next_deadline: float | None = None
        """The earliest time at which a lease may expire; None if there is no lease."""
        self._num_closed = 0
        self.reserved = 0
        self.num_training = 0
        self.num_held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[ActiveLease]:
        return iter(list(self._active.values()))

    def get(self, lease_id: str) -> ActiveLease | None:
        return self._active.get(lease_id)

    def add(self, active: ActiveLease) -> None:
        lease_id = active.lease.lease_id
        self._active[lease_id] = active
        self._changes.put("lease", lease_id, active.record())
        self.reserved += active.reserved
        if active.evaluation is None:
            self.num_training += 1
            self.num_held[active.generator_id] += 1
            heapq.heappush(self._by_version, (active.oldest_version, lease_id))
        deadline = active.grown_at + self.timeout_s
        self.next_deadline = deadline if self.next_deadline is None else min(self.next_deadline, deadline)

    def close(self, lease_id: str, status: str) -> ActiveLease:
        """Remove the lease ``lease_id`` and return it.

        ``status`` is kept, to answer a late or repeated return of its group.
        """
        active = self._active.pop(lease_id)
        self._changes.delete("lease", lease_id)
        self.reserved -= active.reserved
        if active.evaluation is None:
            self.num_training -= 1
            self.num_held[active.generator_id] -= 1
            if not self.num_held[active.generator_id]:
                del self.num_held[active.generator_id]
        while self._by_version and self._by_version[0][1] not in self._active:
            heapq.heappop(self._by_version)
        self.set_status(lease_id, status)
        return active

    def set_status(self, lease_id: str, status: str) -> None:
        self._num_closed += 1
        self._closed[lease_id] = closed = ClosedLease(status, self._num_closed)
        self._changes.put("closed_lease", lease_id, closed)
        while len(self._closed) > _REMEMBERED:
            self._changes.delete("closed_lease", self._closed.popitem(last=False)[0])

    def restore_closed(self, lease_id: str, closed: ClosedLease) -> None:
        """Add an ended lease that the journal has. The caller adds the lease that ended first as the first."""
        self._closed[lease_id] = closed
        self._num_closed = closed.number

    def status_of(self, lease_id: str) -> str | None:
        """Return the status of an ended lease; None if the lease is unknown or ended too long ago."""
        closed = self._closed.get(lease_id)
        return None if closed is None else closed.status

    def training_older_than(self, oldest: int) -> list[ActiveLease]:
        """Return the training leases that may get a token of a version below ``oldest``. They stay in the table."""
        heap, older = self._by_version, []
        while heap and (heap[0][0] < oldest or heap[0][1] not in self._active):
            entry = heapq.heappop(heap)
            if entry[1] in self._active:
                older.append(entry)
        for entry in older:
            heapq.heappush(heap, entry)
        return [self._active[lease_id] for _, lease_id in older]

    def grow(self, lease_id: str, progress: int, now: float) -> None:
        """Record the progress of a lease that a heartbeat reported, at the time ``now``.

        Growth restarts the lease's timeout.
        """
        active = self._active[lease_id]
        if progress > active.progress:
            active.progress, active.grown_at = progress, now

    def expired(self, now: float) -> list[ActiveLease]:
        """Return the leases whose progress has not grown for the timeout.

        They stay in the table until the caller closes them.
        """
        if self.next_deadline is None or now < self.next_deadline:
            return []
        late = [h for h in self._active.values() if now - h.grown_at >= self.timeout_s]
        alive = [h.grown_at + self.timeout_s for h in self._active.values() if now - h.grown_at < self.timeout_s]
        self.next_deadline = min(alive, default=None)
        return late
