"""The groups that the queue stores: those ready for the learner, and those that a snapshot still refers to. Pure.

A group is stored as a ``StoredGroup``: the ref of its payload, and a few numbers that were read at arrival. ``ingest``
adds it, ``batches`` takes it, and ``QueueState.forget_group`` deletes it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from async_rl.queue.storage.journal import Changes
from async_rl.queue.storage.payloads import PayloadRef


class StoredGroup(msgspec.Struct, frozen=True, gc=False):
    """One group that is ready or taken, or that a snapshot refers to.

    ``named_version`` is the generator's active version in its lease request. With ``position`` it gives the order of
    delivery. ``oldest_version`` and ``newest_version`` sampled its tokens; ``bound_version`` is the one of the two that
    ``queue.on_stale`` compares with the staleness bound. ``reward`` and ``accuracy`` are sums over rollouts.
    """

    lease_id: str
    position: int
    named_version: int
    oldest_version: int
    newest_version: int
    bound_version: int
    num_rollouts: int
    num_tokens: int
    reward: float
    accuracy: float
    arrived_at: float
    arrival_version: int
    masked: bool
    ref: PayloadRef

    @property
    def order(self) -> tuple[int, int]:
        return self.named_version, self.position


class GroupRecord(msgspec.Struct, frozen=True, gc=False):
    """A group in the journal. If it is not ``is_live`` (ready or taken), only a snapshot refers to it."""

    group: StoredGroup
    is_live: bool = True

    def record(self) -> GroupRecord:
        return self


class ReadyGroups:
    """Groups by lease id, with one heap by order of delivery and one by age. Adding and removing cost log n.

    A removed group stays in the heaps until it reaches the top.
    """

    def __init__(self, groups: Iterable[StoredGroup] = ()) -> None:
        self._groups: dict[str, StoredGroup] = {}
        self._by_order: list[tuple[int, int, str]] = []
        self._by_bound: list[tuple[int, str]] = []
        self.num_bytes = 0
        self.num_tokens = 0
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[StoredGroup]:
        return iter(list(self._groups.values()))

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._groups

    def add(self, group: StoredGroup) -> None:
        """Add a group. Its lease id must not be present."""
        self._groups[group.lease_id] = group
        heapq.heappush(self._by_order, (*group.order, group.lease_id))
        heapq.heappush(self._by_bound, (group.bound_version, group.lease_id))
        self.num_bytes += group.ref.length
        self.num_tokens += group.num_tokens

    def remove(self, lease_id: str) -> StoredGroup:
        group = self._groups.pop(lease_id)
        self.num_bytes -= group.ref.length
        self.num_tokens -= group.num_tokens
        return group

    def pop_first(self, count: int) -> tuple[StoredGroup, ...]:
        """Remove and return the first ``count`` groups by (named version, stream position). So many must be present."""
        popped: list[StoredGroup] = []
        while len(popped) < count:
            lease_id = heapq.heappop(self._by_order)[-1]
            if lease_id in self._groups:
                popped.append(self.remove(lease_id))
        return tuple(popped)

    def pop_older_than(self, oldest: int) -> list[StoredGroup]:
        """Remove and return every group whose bound version is below ``oldest``."""
        popped: list[StoredGroup] = []
        while self._by_bound and (self._by_bound[0][0] < oldest or self._by_bound[0][1] not in self._groups):
            lease_id = heapq.heappop(self._by_bound)[1]
            if lease_id in self._groups:
                popped.append(self.remove(lease_id))
        return popped

    def pop_all(self) -> list[StoredGroup]:
        """Remove and return every group, in order of delivery."""
        return list(self.pop_first(len(self)))


def snapshot_key(lineage: str, step: int) -> str:
    """The name of the snapshot after ``step`` steps of ``lineage``."""
    return f"{lineage}/{step}"


class SnapshotRecord(msgspec.Struct, frozen=True, gc=False):
    """The groups that one snapshot refers to."""

    lease_ids: tuple[str, ...]

    def record(self) -> SnapshotRecord:
        return self


class SnapshotRefs:
    """The snapshots that a learner may restore, by name, and the groups that they refer to.

    Payloads of these groups stay stored until a newer checkpoint is committed, even after the groups were trained. So
    a checkpoint needs no copy of them. The caller deletes the groups that a release returns.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._snapshots: dict[str, SnapshotRecord] = {}
        self._groups: dict[str, StoredGroup] = {}
        self._counts: Counter[str] = Counter()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._groups

    def __iter__(self) -> Iterator[tuple[str, SnapshotRecord]]:
        return iter(self._snapshots.items())

    @property
    def groups(self) -> list[StoredGroup]:
        """Every group that a snapshot refers to, once."""
        return list(self._groups.values())

    def has_snapshot(self, key: str) -> bool:
        return key in self._snapshots

    def get(self, lease_id: str) -> StoredGroup | None:
        """The group of a lease, if a snapshot refers to it."""
        return self._groups.get(lease_id)

    def add(self, key: str, groups: Iterable[StoredGroup]) -> list[StoredGroup]:
        """Add a snapshot, or replace the one of this name.

        Returns:
            The groups of the replaced snapshot to which no snapshot refers now.
        """
        before, found = self._snapshots.get(key), list(groups)
        self._snapshots[key] = added = SnapshotRecord(tuple(group.lease_id for group in found))
        self._groups |= {group.lease_id: group for group in found}
        self._counts.update(added.lease_ids)
        self._changes.put("snapshot", key, added)
        return [] if before is None else self._uncount(before)

    def release_all_but(self, key: str | None) -> list[StoredGroup]:
        """Remove every other snapshot. Return the groups to which no snapshot refers now."""
        released: list[StoredGroup] = []
        for name in [name for name in self._snapshots if name != key]:
            self._changes.delete("snapshot", name)
            released += self._uncount(self._snapshots.pop(name))
        return released

    def _uncount(self, removed: SnapshotRecord) -> list[StoredGroup]:
        self._counts.subtract(removed.lease_ids)
        gone = [lease_id for lease_id in removed.lease_ids if not self._counts[lease_id]]
        for lease_id in gone:
            del self._counts[lease_id]
        return [self._groups.pop(lease_id) for lease_id in gone]
