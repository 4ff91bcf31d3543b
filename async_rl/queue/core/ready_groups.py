"""The queued groups, in the order of delivery and by age. Pure; adding and removing cost log n whatever is queued."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from async_rl.queue.core.stored_group import HeldGroup


class Shelf:
    """Groups by lease id, with two heaps over them. A removed group stays in the heaps until it comes to their top."""

    def __init__(self, groups: Iterable[HeldGroup] = ()) -> None:
        self._groups: dict[str, HeldGroup] = {}
        self._by_order: list[tuple[int, int, str]] = []
        self._by_bound: list[tuple[int, str]] = []
        self.num_bytes = 0
        self.num_tokens = 0
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[HeldGroup]:
        return iter(list(self._groups.values()))

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._groups

    def get(self, lease_id: str) -> HeldGroup | None:
        return self._groups.get(lease_id)

    def add(self, group: HeldGroup) -> None:
        """Queue a group; its lease id must be new here."""
        self._groups[group.lease_id] = group
        heapq.heappush(self._by_order, (*group.order, group.lease_id))
        heapq.heappush(self._by_bound, (group.bound_version, group.lease_id))
        self.num_bytes += group.place.length
        self.num_tokens += group.num_tokens

    def remove(self, lease_id: str) -> HeldGroup:
        group = self._groups.pop(lease_id)
        self.num_bytes -= group.place.length
        self.num_tokens -= group.num_tokens
        return group

    def pop_first(self, count: int) -> tuple[HeldGroup, ...]:
        """The first ``count`` groups by (named version, stream position); there must be as many."""
        popped: list[HeldGroup] = []
        while len(popped) < count:
            lease_id = heapq.heappop(self._by_order)[-1]
            if lease_id in self._groups:
                popped.append(self.remove(lease_id))
        return tuple(popped)

    def pop_older_than(self, oldest: int) -> list[HeldGroup]:
        """Every group whose bound version is below ``oldest``."""
        popped: list[HeldGroup] = []
        while self._by_bound and (self._by_bound[0][0] < oldest or self._by_bound[0][1] not in self._groups):
            lease_id = heapq.heappop(self._by_bound)[1]
            if lease_id in self._groups:
                popped.append(self.remove(lease_id))
        return popped

    def pop_all(self) -> list[HeldGroup]:
        """Every group, in order of delivery."""
        return list(self.pop_first(len(self)))
