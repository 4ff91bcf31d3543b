"""A generator in simulated time: its slots, the samples that wait for one, and the leases behind them.

It has no engine. Each running sequence gains one token in a decode step, whose time grows with their number. Sequences
begin, and weights change, between two decode steps. ``simulation`` tells it of leases, versions and cancellations.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from async_rl.records import Lease

_ALMOST = 1e-6
"""Decode steps that rounding may take from a sum of times."""


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A lease and its rollouts, which get slots in their order."""

    lease: Lease
    lengths: Sequence[int]  # sampled tokens of each rollout
    started: list[int] = field(default_factory=list)  # the first decode step of each rollout that has got a slot
    num_done: int = 0
    is_submitted: bool = False  # False while the lease waits for a newer version
    is_void: bool = False  # cancelled by the queue


class SimulatedGenerator:
    """One generator with ``num_slots`` slots. A decode step of n sequences takes ``step_s(n)`` seconds."""

    def __init__(self, name: str, num_slots: int, step_s: Callable[[int], float]) -> None:
        self.name, self._num_slots, self._step_s = name, num_slots, step_s
        self.groups: dict[str, SimulatedGroup] = {}  # its leases, by id
        self.is_receiving = False  # a version of the weights is on its way
        self.is_asking = False  # it waits for the answer to a request for leases
        self.activate_first = 0  # it requests no leases before it has activated this version
        self.alarm_at = math.inf  # the time for which the end of its next rollout is scheduled
        self.busy_s = 0.0  # seconds in which at least one sequence ran
        self.version = -1
        self._line: deque[tuple[SimulatedGroup, int]] = deque()
        self._running: list[tuple[int, int, SimulatedGroup]] = []
        self._num_running = self._num_waiting = self._number = 0
        # Decode steps that were done at the time ``_at``, which is ahead of the clock during a pause.
        self._steps, self._at = 0.0, 0.0
        # The first decode step of each version, and the version; the last is the end of the newest.
        self._changed_at: list[float] = [math.inf]
        self._versions: list[int] = []

    @property
    def next_end(self) -> float:
        """The time at which the next rollout ends; infinite if none is running."""
        while self._running and self._running[0][2].is_void:
            heapq.heappop(self._running)
        if not self._running:
            return math.inf
        return self._at + max(0.0, self._running[0][0] - self._steps) * self._step_s(self._num_running)

    def num_wanted(self, group_size: int) -> int:
        """Return how many leases to request: those that fill the free slots, and one in reserve, as the worker does."""
        free = self._num_slots - self._num_running - self._num_waiting
        return math.ceil((free + group_size) / group_size)

    def activate(self, version: int, now: float, pause_s: float) -> None:
        """Change the weights before the next decode step, which begins ``pause_s`` seconds later than it would."""
        self._advance(now)
        self._changed_at.insert(-1, self._boundary)
        self._versions.append(version)
        self.version, self._at = version, max(self._at, now) + pause_s
        self._submit()

    def change_pace(self, step_s: Callable[[int], float], now: float) -> None:
        """Let decode steps take ``step_s(n)`` seconds from now on."""
        self._advance(now)
        self._step_s = step_s

    def accept(self, lease: Lease, lengths: Sequence[int], now: float) -> None:
        """Add a granted lease, whose rollouts will have these lengths."""
        self._advance(now)
        self.groups[lease.lease_id] = SimulatedGroup(lease, lengths)
        self._num_waiting += len(lengths)
        self._submit()

    def finish(self, now: float) -> list[SimulatedGroup]:
        """End the rollouts that are done by ``now``, and begin others. Return the groups that are complete."""
        self._advance(now)
        complete: list[SimulatedGroup] = []
        while self._running and self._running[0][0] <= self._steps + _ALMOST:
            group = heapq.heappop(self._running)[2]
            if not group.is_void:
                self._num_running -= 1
                group.num_done += 1
                if group.num_done == len(group.lengths):
                    complete.append(self.groups.pop(group.lease.lease_id))
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
                until = int(min(end, self._changed_at[index + 1]))
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
        if passed > 0 and self._num_running:
            self.busy_s += passed
            self._steps += passed / self._step_s(self._num_running)
        self._at = max(self._at, now)

    def _submit(self) -> None:
        """Line up the rollouts of leases that the active version may sample."""
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
                self._steps = float(self._boundary)  # nothing runs, so that a decode step begins at once
            group.started.append(self._boundary)
            self._num_waiting -= 1
            self._num_running += 1
            self._number += 1
            heapq.heappush(self._running, (self._boundary + length, self._number, group))
