"""A generator in simulated time: slots, the samples in line for one, and the leases behind them; no engine, no queue.

Time is counted in decode steps. ``simulated.py`` owns one of these for each generator, tells it of leases, versions and
cancellations, and asks it for requests and for the samples that take a slot.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from async_rl.records import Lease


@dataclass(slots=True, eq=False)
class Sample:
    """One rollout. ``started_at`` is its first decode step; -1 while it has no slot."""

    group: SampledGroup
    num_tokens: int
    started_at: int = -1


@dataclass(slots=True, eq=False)
class SampledGroup:
    """A lease and its rollouts. ``submitted`` is False while it waits for a newer version; void: cancelled."""

    lease: Lease
    samples: list[Sample] = field(default_factory=list)
    num_done: int = 0
    submitted: bool = False
    is_void: bool = False

    def num_tokens(self, now: int) -> int:
        """Sampled before the decode step ``now``."""
        return sum(min(s.num_tokens, max(0, now - s.started_at)) for s in self.samples if s.started_at >= 0)


class SimulatedGenerator:
    """As the worker: ``request`` is (version, leases) of the request that is not answered yet, ``asked_at`` the
    queue's revision when it was tried last, ``told`` what version was named in the last answer to which version.
    """

    def __init__(self, name: str, max_running: int) -> None:
        self.name, self._max_running = name, max_running
        self.groups: dict[str, SampledGroup] = {}
        self.running: set[Sample] = set()
        self.line: deque[Sample] = deque()
        self.changed_at: list[int] = []
        self.versions: list[int] = []
        self.activate_first = -1
        self.request: tuple[int, int] | None = None
        self.asked_at = -1
        self.told: tuple[int, int | None] | None = None

    @property
    def version(self) -> int:
        return self.versions[-1] if self.versions else -1

    def activate(self, version: int, now: int) -> None:
        """From the decode step ``now`` on."""
        self.changed_at.append(now)
        self.versions.append(version)

    def ask(self, group_size: int) -> tuple[int, int] | None:
        """(version, leases) of the outstanding request, made anew if there is none and one is due."""
        if self.request is None and self.version >= max(self.activate_first, 0):
            unsubmitted = sum(group_size for g in self.groups.values() if not g.submitted)
            free = self._max_running - len(self.running) - len(self.line) - unsubmitted
            wanted = math.ceil((free + group_size) / group_size)
            self.request = (self.version, wanted) if wanted > 0 else None
        return self.request

    def submit_fresh(self) -> None:
        """Line up the samples of leases that the active version may sample."""
        for group in self.groups.values():
            if not group.submitted and self.version >= group.lease.min_version:
                group.submitted = True
                self.line.extend(group.samples)

    def cancel(self, lease_id: str, now: int) -> int:
        """Stop sampling a lease; the tokens that it had."""
        group = self.groups.pop(lease_id, None)
        if group is None:
            return 0
        group.is_void = True
        self.line = deque(s for s in self.line if s.group is not group)
        self.running = {s for s in self.running if s.group is not group}
        return group.num_tokens(now)

    def admit_waiting(self, now: int) -> list[Sample]:
        """Samples that begin at the decode step ``now``."""
        begun: list[Sample] = []
        while self.line and len(self.running) < self._max_running:
            sample = self.line.popleft()
            sample.started_at = now
            self.running.add(sample)
            begun.append(sample)
        return begun

    def tokens_by_version(self, sample: Sample) -> dict[int, int]:
        """A finished sample's tokens."""
        at, end = sample.started_at, sample.started_at + sample.num_tokens
        index, tokens = bisect_right(self.changed_at, at) - 1, dict[int, int]()
        while at < end:
            until = min(end, self.changed_at[index + 1]) if index + 1 < len(self.changed_at) else end
            if until > at:
                tokens[self.versions[index]] = until - at
            at, index = until, index + 1
        return tokens
