"""The measured speeds of generators and learner, and how they limit leases. All times are in seconds.

``RunAhead``: how far sampling runs ahead of the learner, apart from how old data may be (``queue.run_ahead``). The
staleness bound says how old data may be. If generators are faster than the learner, they fill what the bound admits,
and all data is nearly as old as that. So leases also wait while at least

    G (2 + q L / (S (1 - f)))

training groups are taken, in flight or queued. G are the groups of a batch, L the mean seconds from a lease to its
group's return, S the seconds of the learner's own step, f the share of groups that the filter leaves out. By Little's
law G L / (S (1 - f)) groups are in flight where groups arrive as fast as the learner trains them; one batch is trained
meanwhile, and one is ready. The slack q makes up for what means don't say: it grows with the time for which the
learner waited for groups while leases were held back, and shrinks slowly while it does not. It does so once enough
steps are timed: before, waits say only that they are not.

Pace only delays leases. While the learner waits for a batch, more are given all the time, up to what the bound admits,
so lost generators, failures and filtered groups never keep a batch from being sampled. What is known is not stored: a
restarted queue server, and a learner that attaches, measure anew.

``Paces``: how fast each generator samples, and which are too slow for the staleness bound. A generator that is much
slower than the others holds leases while the learner goes on. Its groups come back too old, or steps wait for them. So
a generator gets no training lease if both hold:

- It takes at least ``TIMES_SLOWER`` times as long for a group as the others do. Only speed counts, in tokens of a lease
  per second, because a longer answer takes longer everywhere.
- In the time that it needs for a group, the run would train more batches than the bound admits. A batch takes the
  learner's time, or the time in which the others together could sample it.

By Little's law groups take no longer than all the batches that the bound admits, on average, if all generators are
equally fast. So the second condition alone holds for hardly any generator of such a fleet.

The leases with which a generator begins don't count: its engine may still compile or warm up.

A slow generator still gets evaluations. Because its speed may change, what is known about it is forgotten after
``TRIAL_AFTER`` times the time of one of its groups, and it gets one lease. A restarted queue server measures anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
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
        seconds_of = {"time/group_s": self.group_s, "time/own_step_s": self.step_s}
        metrics = {name: seconds for name, seconds in seconds_of.items() if seconds}
        if limit < math.inf:
            is_held = bool(self._steps) and now - self._held_at <= self._steps[-1]
            metrics |= {"queue/run_ahead_limit": limit, "queue/run_ahead_held": float(is_held)}
        return metrics | ({"queue/run_ahead_slack": self.slack} if self.setting == "auto" else {})

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


# The speed of each generator.

TIMES_SLOWER = 3.0
TRIAL_AFTER = 16.0
_EVIDENCE = 6.0
"""What is known about a generator counts once its leases have lasted this many times as long as a group of the others;
and what is known about these, once they have returned so many groups."""
_REMEMBERED_GROUPS = 64
"""After so many groups, the sums over a generator's leases are halved, so that old ones count less and less."""


@dataclass(slots=True)
class Pace:
    """Sums over the ended training leases of one generator.

    Attributes:
        tokens: what it sampled for them.
        lease_s: for how long it held them, summed.
        groups: the number of those that it returned.
        warm_at: when its first lease ended; None before. Leases that were granted earlier don't count.
        most_leases: the largest number of training leases that it held at a time.
        trial_at: the time of its next trial, if it is too slow; else None.
        is_on_trial: whether nothing is known about it except that it was too slow.
        why: why it gets no training lease; empty if it gets some.
    """

    tokens: float = 0.0
    lease_s: float = 0.0
    groups: float = 0.0
    warm_at: float | None = None
    most_leases: int = 0
    trial_at: float | None = None
    is_on_trial: bool = False
    why: str = ""

    @property
    def groups_per_s(self) -> float:
        """How many groups it could return in a second."""
        return self.most_leases * self.groups / self.lease_s if self.lease_s else 0.0

    def forget(self) -> None:
        self.tokens = self.lease_s = self.groups = 0.0
        self.trial_at, self.is_on_trial, self.why = None, True, ""


@dataclass(frozen=True, slots=True)
class Window:
    """What the bound admits: ``batches`` of ``groups_per_step`` groups, each of which the learner trains in
    ``learner_s`` seconds (0 if unknown). ``max_staleness`` is the bound, for messages.
    """

    batches: int
    groups_per_step: int
    learner_s: float
    max_staleness: int


class Paces:
    """The paces of all generators, by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Pace] = {}
        # Sums over all, so that a request does not look at every generator.
        self._tokens = self._lease_s = self._groups = self._groups_per_s = 0.0

    def pace_of(self, generator_id: str) -> Pace:
        return self._by_id.setdefault(generator_id, Pace())

    def why(self, generator_id: str) -> str:
        """Return why a generator gets no training lease; empty if it gets some."""
        pace = self._by_id.get(generator_id)
        return "" if pace is None else pace.why

    def remove(self, generator_id: str) -> None:
        pace = self._by_id.pop(generator_id, None)
        if pace is not None:
            self._add(pace, -1)

    def granted(self, generator_id: str, num_held: int) -> None:
        """Record that a generator holds ``num_held`` training leases, after it was granted some."""
        pace = self.pace_of(generator_id)
        if num_held > pace.most_leases:
            self._add(pace, -1)
            pace.most_leases = num_held
            self._add(pace, 1)

    def ended(self, generator_id: str, tokens: int, issued_at: float, now: float, *, is_returned: bool) -> None:
        """Record a training lease of ``issued_at`` that has ended, in which ``tokens`` tokens were sampled."""
        pace = self.pace_of(generator_id)
        if pace.warm_at is None:
            pace.warm_at = now
        if issued_at < pace.warm_at:
            return
        self._add(pace, -1)
        if pace.groups >= _REMEMBERED_GROUPS:
            pace.tokens, pace.lease_s, pace.groups = pace.tokens / 2, pace.lease_s / 2, pace.groups / 2
        pace.tokens += tokens
        pace.lease_s += max(0.0, now - issued_at)
        pace.groups += is_returned
        pace.is_on_trial = False
        self._add(pace, 1)

    def check(self, generator_id: str, window: Window, now: float, others_sample: Callable[[], bool]) -> str:
        """Return why a generator is too slow for a lease at ``now``; empty if it is not.

        ``others_sample`` tells whether another generator samples at all. It is called only if this one is slow.
        """
        pace = self.pace_of(generator_id)
        if pace.trial_at is not None and now >= pace.trial_at:
            self._add(pace, -1)
            pace.forget()
            self._add(pace, 1)
        group_s, others_s = self._group_s(pace)
        others_per_s = self._groups_per_s - pace.groups_per_s
        batch_s = max(window.learner_s, window.groups_per_step / others_per_s) if others_per_s > 0 else math.inf
        is_slow = group_s >= TIMES_SLOWER * others_s and group_s > window.batches * batch_s
        if not is_slow or not others_sample():
            pace.trial_at, pace.why = None, ""
            return ""
        if pace.trial_at is None:
            pace.trial_at = now + TRIAL_AFTER * group_s
        pace.why = (
            f"too slow for a staleness bound of {window.max_staleness}: a group takes it about {_show(group_s)} s "
            f"(the others {_show(others_s)} s), in which the run trains {group_s / batch_s:.3g} batches without it; it "
            f"still gets evaluations, and is tried again in {_show(pace.trial_at - now)} s"
        )
        return pace.why

    def _group_s(self, pace: Pace) -> tuple[float, float]:
        """Return how long a group takes on this generator, and on the others; 0, 0 if too little is known."""
        tokens, lease_s = self._tokens - pace.tokens, self._lease_s - pace.lease_s
        groups = self._groups - pace.groups
        if groups < _EVIDENCE or min(tokens, lease_s) <= 0:
            return 0.0, 0.0
        others_s = lease_s / groups
        if pace.lease_s < _EVIDENCE * others_s:
            return 0.0, 0.0
        # A generator that has sampled nothing counts as if it had sampled one token.
        times_slower = tokens / lease_s * pace.lease_s / max(1.0, pace.tokens)
        return times_slower * others_s, others_s

    def _add(self, pace: Pace, sign: int) -> None:
        self._tokens += sign * pace.tokens
        self._lease_s += sign * pace.lease_s
        self._groups += sign * pace.groups
        self._groups_per_s += sign * pace.groups_per_s


def _show(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"
