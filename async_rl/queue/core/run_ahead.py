"""How far sampling runs ahead of the learner, apart from how old data may be (``queue.run_ahead``).

The staleness bound says how old data may be. If generators are faster than the learner, they fill what the bound
admits, and all data is nearly as old as that. So leases also wait while at least

    G (2 + q L / (S (1 - f)))

training groups are taken, in flight or queued. G are the groups of a batch, L the mean seconds from a lease to its
group's return, S the seconds of the learner's own step, f the share of groups that the filter leaves out. By Little's
law G L / (S (1 - f)) groups are in flight where groups arrive as fast as the learner trains them; one batch is trained
meanwhile, and one is ready. The slack q makes up for what means don't say: it grows with the time for which the
learner waited for groups while leases were held back, and shrinks slowly while it does not. It does so once enough
steps are timed: before, waits say only that they are not.

Pace only delays leases. While the learner waits for a batch, more are given all the time, up to what the bound admits,
so lost generators, failures and filtered groups never keep a batch from being sampled. What is known is not stored: a
restarted queue server, and a learner that attaches, measure anew. All times are in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

RunAheadSetting = Literal["auto", "bound"] | float
"""The value of ``queue.run_ahead``; a number is that of the batches that may be in flight or ready during a step."""

BEFORE_KNOWN = 3
"""Batches before the first step and the first group were timed: one is trained, one is ready, one is sampled."""
SLACK = 1.2
"""The least slack."""
_GROWTH, _SHRINKING = 0.5, 0.998
"""The slack grows by this share of itself for a wait as long as a step, and after any other step it shrinks by this
factor. The two balance where waits take 0.4 % of the time; what goes beyond a step is not counted."""
_WAIT = 0.02
"""A step waited if it took this share of the learner's own step."""
_STEPS = 5
"""S is the median of the last five steps: one with a checkpoint does not change it, and three longer ones do. The slack
stays as it is until there are five."""
_BATCHES = 2.0
"""L and f are means in which older groups count less and less: after so many batches about a third as much."""
_PARTS = 4
"""More leases are given after each quarter of a step that the learner waits ..."""
_LEAST_PART_S = 0.01
"""... but not more often than this."""


@dataclass(slots=True)
class RunAhead:
    """The pace of one run. Its methods are called when something happens at the queue.

    Attributes:
        setting: the value of ``queue.run_ahead``.
        groups_per_step: G.
        slack: q.
        group_s: L; 0 before the first group.
        filtered: f.
    """

    setting: RunAheadSetting
    groups_per_step: int
    slack: float = SLACK
    group_s: float = 0.0
    filtered: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _taken_at: float | None = None
    _asked_at: float | None = None
    _held_at: float = -math.inf  # the time at which a lease was last held back
    _held_limit: float | None = None  # the limit then; None once the learner has taken or trained a batch

    @property
    def step_s(self) -> float:
        """S; 0 before the first step."""
        return median(self._steps) if self._steps else 0.0

    def metrics(self, now: float) -> dict[str, float]:
        """Return the metrics of the step that has just been trained, by name; without what is not known yet."""
        limit = self.limit(now)
        known = {"time/group_s": self.group_s, "time/own_step_s": self.step_s}
        found = {name: seconds for name, seconds in known.items() if seconds}
        if limit < math.inf:
            is_held = bool(self._steps) and now - self._held_at <= self._steps[-1]
            found |= {"queue/run_ahead_limit": limit, "queue/run_ahead_held": float(is_held)}
        return found | ({"queue/run_ahead_slack": self.slack} if self.setting == "auto" else {})

    def attach(self) -> None:
        """Forget the learner's steps: another learner may be slower or faster, or sit on another machine."""
        self._steps.clear()
        self._taken_at = self._asked_at = self._held_limit = None

    def returned(self, seconds: float, *, is_filtered: bool) -> None:
        """Record a training group that returned ``seconds`` after its lease."""
        weight = 1 / (_BATCHES * self.groups_per_step)
        self.group_s = seconds if not self.group_s else self.group_s + weight * (seconds - self.group_s)
        self.filtered += weight * (is_filtered - self.filtered)

    def took(self, now: float) -> None:
        """Record that the learner got its batch."""
        if self._asked_at is not None and self.step_s and len(self._steps) == _STEPS:
            waited = (now - self._asked_at) / self.step_s
            # A lease that was held back earlier would not have returned by now.
            was_held = now - self._held_at < self.group_s + self.step_s
            growth = 1 + _GROWTH * min(1.0, waited)
            self.slack = max(SLACK, self.slack * (growth if waited > _WAIT and was_held else _SHRINKING))
        self._taken_at, self._asked_at, self._held_limit = now, None, None

    def trained(self, now: float) -> None:
        """Record that the learner has trained its batch. It asks for the next one at once."""
        if self._taken_at is not None:
            self._steps.append(now - self._taken_at)
        self._taken_at, self._asked_at, self._held_limit = None, now, None

    def limit(self, now: float) -> float:
        """Return how many groups may be taken, in flight and queued together, a whole number or infinity."""
        if self.setting == "bound":
            return math.inf
        if self.setting != "auto":
            return math.ceil(self.groups_per_step * (1 + self.setting))
        batches: float = BEFORE_KNOWN
        if self.group_s and self.step_s:
            batches = 2 + self.slack * self.group_s / (self.step_s * max(1e-3, 1 - self.filtered))
        return math.ceil(self.groups_per_step * (batches + self._num_waited(now) / _PARTS))

    def hold(self, limit: float, now: float) -> None:
        """Record that a lease was held back at ``limit``."""
        self._held_limit, self._held_at = limit, now

    def has_grown(self, now: float) -> bool:
        """Return whether the limit has grown since leases were held back, or since this was asked."""
        if self._held_limit is None or (limit := self.limit(now)) <= self._held_limit:
            return False
        self._held_limit = limit
        return True

    def next_change(self, now: float) -> float | None:
        """Return when the limit grows because the learner waits while leases are held back; None if it does not."""
        if self._held_limit is None or self._asked_at is None or self.setting != "auto" or not self.step_s:
            return None
        return self._asked_at + (self._num_waited(now) + 1) * self._part_s

    @property
    def _part_s(self) -> float:
        return max(_LEAST_PART_S, self.step_s / _PARTS)

    def _num_waited(self, now: float) -> int:
        """Return the number of quarters of a step for which the learner has waited."""
        waited_s = 0.0 if self._asked_at is None or not self.step_s else now - self._asked_at
        return int(waited_s / self._part_s + 1e-9)  # not one too few at the time of a change
