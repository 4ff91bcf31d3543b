"""A generator in simulated time: its slots, the samples that wait for one, and the leases behind them.

It has no engine. Each running sequence gains one token in a decode step of ``decode_step_s`` seconds. Sequences begin,
and weights change, between two decode steps. ``simulation`` tells it of leases, versions and cancellations.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_rl.records import Lease

_ALMOST = 1e-6
"""Decode steps that rounding may take from a sum of times."""


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A lease and its rollouts.

    Attributes:
        lengths: sampled tokens of each rollout.
        started: the decode step with which each rollout began that has a slot. Rollouts begin in their order.
        num_done: the number of rollouts that have ended.
        is_submitted: False while the lease waits for a newer version.
        is_void: whether the queue has cancelled the lease.
    """

    lease: Lease
    lengths: Sequence[int]
    started: list[int]
    num_done: int = 0
    is_submitted: bool = False
    is_void: bool = False


class SimulatedGenerator:
    """One generator with ``num_slots`` slots.

    Attributes:
        groups: the leases that it has, by id.
        is_receiving: whether a version of the weights is on its way.
        is_asking: whether it waits for the answer to a request for leases.
        activate_first: it requests no leases before it has activated this version.
        alarm_at: the time for which the end of its next rollout is scheduled.
        busy_s: seconds in which at least one sequence ran.
        busy_sequence_s: the same, summed over sequences.
    """

    def __init__(self, name: str, num_slots: int, decode_step_s: float) -> None:
        self.name, self._num_slots, self._decode_step_s = name, num_slots, decode_step_s
        self.groups: dict[str, SimulatedGroup] = {}
        self.is_receiving = self.is_asking = False
        self.activate_first = 0
        self.alarm_at = math.inf
        self.busy_s = self.busy_sequence_s = 0.0
        self._line: deque[tuple[SimulatedGroup, int]] = deque()
        self._running: list[tuple[int, int, SimulatedGroup]] = []
        self._num_running = self._num_waiting = self._number = 0
        # Decode steps that were done at the time ``_at``, which is ahead of the clock during a pause.
        self._steps, self._at = 0.0, 0.0
        self._changed_at: list[int] = []
        self._versions: list[int] = []

    @property
    def version(self) -> int:
        """The active version; -1 before the first."""
        return self._versions[-1] if self._versions else -1

    @property
    def next_end(self) -> float:
        """The time at which the next rollout ends; infinite if none is running."""
        while self._running and self._running[0][2].is_void:
            heapq.heappop(self._running)
        if not self._running:
            return math.inf
        return self._at + max(0.0, self._running[0][0] - self._steps) * self._decode_step_s

    def num_wanted(self, group_size: int) -> int:
        """Return how many leases to request: those that fill the free slots, and one in reserve, as the worker does."""
        free = self._num_slots - self._num_running - self._num_waiting
        return math.ceil((free + group_size) / group_size)

    def activate(self, version: int, now: float, pause_s: float) -> None:
        """Change the weights before the next decode step, which begins ``pause_s`` seconds later than it would."""
        self._advance(now)
        self._changed_at.append(self._boundary)
        self._versions.append(version)
        self._at = max(self._at, now) + pause_s
        self._submit(now)

    def accept(self, lease: Lease, lengths: Sequence[int], now: float) -> None:
        """Add a granted lease, whose rollouts will have these lengths."""
        self.groups[lease.lease_id] = SimulatedGroup(lease, lengths, [])
        self._num_waiting += len(lengths)
        self._submit(now)

    def finish(self, now: float) -> list[SimulatedGroup]:
        """End the rollouts that are done by ``now``, and begin others. Return the groups that are complete."""
        self._advance(now)
        complete: list[SimulatedGroup] = []
        while self._running and self._running[0][0] <= self._steps + _ALMOST:
            _, _, group = heapq.heappop(self._running)
            if not group.is_void:
                self._num_running -= 1
                group.num_done += 1
                if group.num_done == len(group.lengths):
                    del self.groups[group.lease.lease_id]
                    complete.append(group)
        self._admit()
        return complete

    def cancel(self, lease_ids: Iterable[str], now: float) -> None:
        """Stop sampling leases."""
        self._advance(now)
        for lease_id in lease_ids:
            if (group := self.groups.pop(lease_id, None)) is not None:
                group.is_void = True
                self._num_running -= len(group.started) - group.num_done
                self._num_waiting -= len(group.lengths) - len(group.started)
        self._admit()

    def tokens_by_version(self, group: SimulatedGroup) -> list[dict[int, int]]:
        """Return for each rollout of a complete group how many of its tokens each version sampled."""
        rollouts: list[dict[int, int]] = []
        for at, length in zip(group.started, group.lengths, strict=True):
            end, index, tokens = at + length, bisect_right(self._changed_at, at) - 1, dict[int, int]()
            while at < end:
                is_last = index + 1 == len(self._changed_at)
                until = end if is_last else min(end, self._changed_at[index + 1])
                if until > at:
                    tokens[self._versions[index]] = until - at
                at, index = until, index + 1
            rollouts.append(tokens)
        return rollouts

    @property
    def _boundary(self) -> int:
        """The next decode step to begin."""
        return math.ceil(self._steps - _ALMOST)

    def _advance(self, now: float) -> None:
        passed = now - self._at
        if passed <= 0:
            return
        self._at = now
        if self._num_running:
            self.busy_s += passed
            self.busy_sequence_s += passed * self._num_running
            self._steps += passed / self._decode_step_s
        else:
            # Without a sequence no decode step runs, so the next one begins at once.
            self._steps = float(self._boundary)

    def _submit(self, now: float) -> None:
        """Line up the rollouts of leases that the active version may sample."""
        self._advance(now)
        for group in self.groups.values():
            if not group.is_submitted and self.version >= group.lease.min_version:
                group.is_submitted = True
                self._line.extend((group, length) for length in group.lengths)
        self._admit()

    def _admit(self) -> None:
        while self._line and self._num_running < self._num_slots:
            group, length = self._line.popleft()
            if group.is_void:
                continue
            if not self._num_running:
                self._steps = float(self._boundary)
            start = self._boundary
            group.started.append(start)
            self._num_waiting -= 1
            self._num_running += 1
            self._number += 1
            heapq.heappush(self._running, (start + length, self._number, group))
