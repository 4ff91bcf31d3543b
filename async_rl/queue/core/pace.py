"""How fast each generator samples, and which are too slow for the staleness bound.

A generator that is much slower than the others holds leases while the learner goes on. Its groups come back too old, or
steps wait for them. So a generator gets no training lease if both hold:

- It takes at least ``TIMES_SLOWER`` times as long for a group as the others do. Only speed counts, in tokens of a lease
  per second, because a longer answer takes longer everywhere.
- In the time that it needs for a group, the run would train more batches than the bound admits. A batch takes the
  learner's time, or the time in which the others together could sample it.

By Little's law groups take no longer than all the batches that the bound admits, on average, if all generators are
equally fast. So the second condition alone holds for hardly any generator of such a fleet.

The leases with which a generator begins don't count: its engine may still compile or warm up.

A slow generator still gets evaluations. Because its speed may change, what is known about it is forgotten after
``TRIAL_AFTER`` times the time of one of its groups, and it gets one lease. A restarted queue server measures anew.

All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
        known = self._by_id.get(generator_id)
        return "" if known is None else known.why

    def remove(self, generator_id: str) -> None:
        known = self._by_id.pop(generator_id, None)
        if known is not None:
            self._add(known, -1)

    def granted(self, generator_id: str, num_held: int) -> None:
        """Record that a generator holds ``num_held`` training leases, after it was granted some."""
        known = self.pace_of(generator_id)
        if num_held > known.most_leases:
            self._add(known, -1)
            known.most_leases = num_held
            self._add(known, 1)

    def ended(self, generator_id: str, tokens: int, issued_at: float, now: float, *, is_returned: bool) -> None:
        """Record a training lease of ``issued_at`` that has ended, in which ``tokens`` tokens were sampled."""
        known = self.pace_of(generator_id)
        if known.warm_at is None:
            known.warm_at = now
        if issued_at < known.warm_at:
            return
        self._add(known, -1)
        if known.groups >= _REMEMBERED_GROUPS:
            known.tokens, known.lease_s, known.groups = known.tokens / 2, known.lease_s / 2, known.groups / 2
        known.tokens += tokens
        known.lease_s += max(0.0, now - issued_at)
        known.groups += is_returned
        known.is_on_trial = False
        self._add(known, 1)

    def check(self, generator_id: str, window: Window, now: float, others_sample: Callable[[], bool]) -> str:
        """Return why a generator is too slow for a lease at ``now``; empty if it is not.

        ``others_sample`` tells whether another generator samples at all. It is called only if this one is slow.
        """
        known = self.pace_of(generator_id)
        if known.trial_at is not None and now >= known.trial_at:
            self._add(known, -1)
            known.forget()
            self._add(known, 1)
        group_s, others_s = self._group_s(known)
        others = self._groups_per_s - known.groups_per_s
        batch_s = max(window.learner_s, window.groups_per_step / others) if others > 0 else math.inf
        is_slow = group_s >= TIMES_SLOWER * others_s and group_s > window.batches * batch_s
        if not is_slow or not others_sample():
            known.trial_at, known.why = None, ""
            return ""
        if known.trial_at is None:
            known.trial_at = now + TRIAL_AFTER * group_s
        known.why = (
            f"too slow for a staleness bound of {window.max_staleness}: a group takes it about {_show(group_s)} s "
            f"(the others {_show(others_s)} s), in which the run trains {group_s / batch_s:.3g} batches without it; it "
            f"still gets evaluations, and is tried again in {_show(known.trial_at - now)} s"
        )
        return known.why

    def _group_s(self, known: Pace) -> tuple[float, float]:
        """Return how long a group takes on this generator, and on the others; 0, 0 if too little is known."""
        tokens, lease_s = self._tokens - known.tokens, self._lease_s - known.lease_s
        groups = self._groups - known.groups
        if groups < _EVIDENCE or min(tokens, lease_s) <= 0:
            return 0.0, 0.0
        others_s = lease_s / groups
        if known.lease_s < _EVIDENCE * others_s:
            return 0.0, 0.0
        # A generator that has sampled nothing counts as if it had sampled one token.
        times_slower = tokens / lease_s * known.lease_s / max(1.0, known.tokens)
        return times_slower * others_s, others_s

    def _add(self, known: Pace, sign: int) -> None:
        self._tokens += sign * known.tokens
        self._lease_s += sign * known.lease_s
        self._groups += sign * known.groups
        self._groups_per_s += sign * known.groups_per_s


def _show(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"
