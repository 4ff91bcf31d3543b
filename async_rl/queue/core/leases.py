"""The tables of leases in flight and of the generators that hold them. All times are in seconds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from async_rl.queue.core.failures import EvalKey, Failing, Outage, outage_of
from async_rl.queue.core.pace import Paces
from async_rl.queue.messages import DOCTOR, GENERATOR_TOTALS, MAX_COUNTERS, MAX_TOTAL, Decoded, GeneratorStats
from async_rl.queue.storage.journal import Changes
from async_rl.records import Lease

QUARANTINE_OF = 100
"""``queue.max_refused_share`` is a share of this many groups, the last that a generator returned."""
TROUBLE_LOG_S = 10.0
"""Minimum interval between two log lines about the problems of one generator."""
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
        self._check_at: float | None = None
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
        self._changes.put("lease", lease_id, active.record(), is_new=True)
        self.reserved += active.reserved
        if active.evaluation is None:
            self.num_training += 1
            self.num_held[active.generator_id] += 1
            heapq.heappush(self._by_version, (active.oldest_version, lease_id))
        deadline = active.grown_at + self.timeout_s
        self._check_at = deadline if self._check_at is None else min(self._check_at, deadline)

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

    def restore_closed(self, lease_id: str, known: ClosedLease) -> None:
        """Add an ended lease that the journal has. The caller adds the lease that ended first as the first."""
        self._closed[lease_id] = known
        self._num_closed = known.number

    def status_of(self, lease_id: str) -> str | None:
        """Return the status of an ended lease; None if the lease is unknown or ended too long ago."""
        known = self._closed.get(lease_id)
        return None if known is None else known.status

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

    @property
    def next_deadline(self) -> float | None:
        """The earliest time at which a lease may expire; None if there is no lease."""
        return self._check_at

    def expired(self, now: float) -> list[ActiveLease]:
        """Return the leases whose progress has not grown for the timeout.

        They stay in the table until the caller closes them.
        """
        if self._check_at is None or now < self._check_at:
            return []
        late = [h for h in self._active.values() if now - h.grown_at >= self.timeout_s]
        alive = [h.grown_at + self.timeout_s for h in self._active.values() if now - h.grown_at < self.timeout_s]
        self._check_at = min(alive, default=None)
        return late


class Owner(msgspec.Struct, frozen=True, gc=False):
    """The client that may use a generator's id: the one with this key or, on a server without keys, this secret.

    ``name`` is the public key, or the digest of the secret. ``has_key`` says which of the two.
    """

    name: str = ""
    has_key: bool = False


NOBODY = Owner()


class GeneratorRecord(msgspec.Struct, frozen=True, gc=False):
    """A generator as the journal stores it. The fields mean the same as in ``GeneratorEntry``."""

    owner: Owner
    refused: dict[str, int]
    returned: list[bool]
    quarantined: str


@dataclass(slots=True)
class GeneratorEntry:
    """What the queue knows about one generator.

    Attributes:
        seen_at: the time of its last message.
        owner: the client that may use its id.
        active: the lineage and the version of its weights at its last lease request; None before.
        stats: its totals from its last heartbeat.
        trouble: why it got no weights at its last heartbeat; empty if nothing was wrong.
        cancelled: ids of its cancelled leases that it has not been told about.
        refused: the number of its refused groups, by cause.
        returned: for each of its last groups, whether the group was refused.
        quarantined: the reason why it gets no more leases; empty if it gets leases.
        num_foreign: the number of requests under its id that came from other clients and were refused.
        failing: its leases that failed since its last good group.
        good_since: the largest ``ActiveLease.since`` of its good groups; -1 if it has returned none.
    """

    generator_id: str
    seen_at: float
    owner: Owner = NOBODY
    host: str = ""
    backend: str = ""
    active: tuple[str, int] | None = None
    stats: GeneratorStats = field(default_factory=GeneratorStats)
    cancelled: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    returned: deque[bool] = field(default_factory=lambda: deque(maxlen=QUARANTINE_OF))
    quarantined: str = ""
    num_foreign: int = 0
    failing: Failing = field(default_factory=Failing)
    good_since: int = -1
    trouble: str = ""
    _logged_trouble: str = ""
    _log_trouble_at: float = -math.inf

    def must_log_trouble(self, now: float) -> bool:
        """Return whether ``trouble`` has changed since this method last returned True.

        After it has returned True, it returns False for ``TROUBLE_LOG_S``, so that no generator can fill the log.
        """
        if self.trouble == self._logged_trouble or now < self._log_trouble_at:
            return False
        self._logged_trouble, self._log_trouble_at = self.trouble, now + TROUBLE_LOG_S
        return True

    def note_returned(self, *, refused: bool) -> None:
        self.returned.append(refused)

    def record(self) -> GeneratorRecord:
        return GeneratorRecord(self.owner, dict(self.refused), list(self.returned), self.quarantined)

    def why_failing(self, now: float) -> str:
        """Return a sentence if it is quarantined because its leases fail where others succeed; else empty text."""
        line = self.failing.line(now)
        return line and f"generator {self.generator_id!r} is quarantined, while others succeed: {line}"

    @property
    def causes(self) -> str:
        """Text that lists the causes of its refused groups, each with the number of groups."""
        return ", ".join(f"{cause}: {number}" for cause, number in self.refused.most_common())


class GeneratorTable:
    """All known generators, by id.

    A generator counts as alive until it was silent for ``timeout_s``, and is removed after ten times as long. ``paces``
    says how fast they sample.
    """

    def __init__(self, timeout_s: float, changes: Changes) -> None:
        self._timeout_s, self._changes = timeout_s, changes
        self._entries: dict[str, GeneratorEntry] = {}
        self._to_notify: set[str] = set()
        self._failing: set[str] = set()
        """The generators that are quarantined because their leases fail, and maybe some that no longer are."""
        self._forget_at = 0.0
        self.paces = Paces()

    def seen(self, generator_id: str, now: float) -> GeneratorEntry:
        entry = self._entries.get(generator_id)
        if entry is None:
            entry = self._entries[generator_id] = GeneratorEntry(generator_id, now)
        entry.seen_at = max(now, entry.seen_at)
        return entry

    def get(self, generator_id: str) -> GeneratorEntry | None:
        return self._entries.get(generator_id)

    def save(self, entry: GeneratorEntry) -> None:
        """Write a generator's entry to the journal."""
        self._changes.put("generator", entry.generator_id, entry.record())

    def restore(self, generator_id: str, known: GeneratorRecord, now: float) -> None:
        """Add a generator that the journal has. It does not count as alive until it sends a message."""
        entry = self._entries[generator_id] = GeneratorEntry(generator_id, now - 2 * self._timeout_s, known.owner)
        entry.refused.update(known.refused)
        entry.returned.extend(known.returned)
        entry.quarantined = known.quarantined

    def remove(self, generator_id: str) -> None:
        if self._entries.pop(generator_id, None) is not None:
            self._changes.delete("generator", generator_id)
        self.paces.remove(generator_id)
        self._to_notify.discard(generator_id)

    def belongs_to(self, entry: GeneratorEntry, owner: Owner, now: float) -> bool:
        """Return whether ``owner`` may use the id of the generator ``entry``, or replace that generator.

        A generator without a key may be replaced by any other when it is not alive, because a generator gets a new
        secret when it restarts.
        """
        return entry.owner == owner or not (entry.owner.has_key or self.is_alive(entry, now))

    def forget_silent(self, now: float) -> int:
        """Remove the generators that have been silent for ten times ``timeout_s``, and return their number.

        It is called on every request, so it looks at all generators only when one may have to be removed.
        """
        if now < self._forget_at:
            return 0
        silent = [entry for entry in self._entries.values() if now - entry.seen_at > 10 * self._timeout_s]
        for entry in silent:
            self.remove(entry.generator_id)
        self._forget_at = min((e.seen_at for e in self._entries.values()), default=now) + 10 * self._timeout_s
        return len(silent)

    def alive(self, now: float) -> list[GeneratorEntry]:
        """Return the generators that are alive. A doctor is none, because it takes no leases."""
        return list(self._alive(now))

    def _alive(self, now: float) -> Iterator[GeneratorEntry]:
        return (e for e in self._entries.values() if self.is_alive(e, now) and e.backend != DOCTOR)

    def alive_clients(self, now: float) -> list[GeneratorEntry]:
        """Return the generators and the doctors that are alive."""
        return [e for e in self._entries.values() if self.is_alive(e, now)]

    def is_alive(self, entry: GeneratorEntry, now: float) -> bool:
        """Return whether the generator was silent for at most ``timeout_s``."""
        return now - entry.seen_at <= self._timeout_s

    def outage(self, now: float) -> Outage | None:
        """Return the outage if all generators that could sample are quarantined because their leases fail.

        It is called for every lease and group, so it looks no further than at the first that is not.
        """
        failing: dict[str, Failing] = {}
        for entry in self._alive(now):
            if not entry.quarantined and entry.failing.retry_at is None:
                return None
            if not entry.quarantined:
                failing[entry.generator_id] = entry.failing
        return outage_of(failing)

    def has_another(self, generator_id: str, now: float) -> bool:
        """Return whether a generator other than this one samples: it is alive, has weights, and is not quarantined."""
        return any(
            e.generator_id != generator_id and e.active is not None and not e.quarantined and e.failing.retry_at is None
            for e in self._alive(now)
        )

    def note_pace(self, active: ActiveLease, tokens: int, now: float, *, is_returned: bool) -> None:
        """Record how long a training lease took that has ended, with at least ``tokens`` sampled tokens."""
        if active.generator_id in self._entries:
            tokens = max(tokens, active.counted_progress)
            self.paces.ended(active.generator_id, tokens, active.issued_at, now, is_returned=is_returned)

    def note_failing(self, generator_id: str) -> None:
        """Record that this generator is quarantined because its leases fail."""
        self._failing.add(generator_id)

    def _await_trial(self) -> list[Failing]:
        """Return the failures of the generators whose pause before the next trial has not ended.

        It is called for every request, so it looks only at generators that have failed.
        """
        found = {name: self._entries[name].failing for name in self._failing if name in self._entries}
        self._failing = {name for name, failing in found.items() if failing.retry_at is not None}
        return [found[name] for name in self._failing if not (found[name].trial or found[name].is_due)]

    @property
    def next_trial(self) -> float | None:
        """The earliest time at which a generator that is quarantined for failed leases may try one; None if none."""
        return min((one.retry_at for one in self._await_trial() if one.retry_at is not None), default=None)

    def due_trials(self, now: float) -> int:
        """Return the number of generators that may try a lease since ``now``. Each is returned once."""
        due = [one for one in self._await_trial() if one.retry_at is not None and one.retry_at <= now]
        for one in due:
            one.is_due = True
        return len(due)

    def why_nobody(self, now: float) -> str:
        """Return a text that says that all generators that are alive are quarantined, with the reasons.

        Return "" if a generator is alive and not quarantined, or if none is alive.
        """
        named: list[str] = []
        for entry in self._alive(now):
            if not entry.quarantined:
                return ""
            named.append(f"{entry.generator_id}: {entry.quarantined}")
        return (
            f"every generator is quarantined: {'; '.join(named)}; see the generators' logs, then start them again"
            if named
            else ""
        )

    def cancel(self, active: ActiveLease) -> None:
        """Record that the generator of this lease must stop sampling it.

        The server will send the generator a notice.
        """
        entry = self._entries.get(active.generator_id)
        if entry is not None:
            entry.cancelled.add(active.lease.lease_id)
            self._to_notify.add(active.generator_id)

    def pop_cancelled(self, generator_id: str) -> set[str]:
        entry = self._entries.get(generator_id)
        if entry is None:
            return set()
        cancelled, entry.cancelled = entry.cancelled, set()
        self._to_notify.discard(generator_id)
        return cancelled

    def to_notify(self) -> list[str]:
        return list(self._to_notify)

    def total(self, now: float) -> GeneratorStats:
        """Return the sum of the statistics of all generators that are alive. None exceeds ``MAX_TOTAL``.

        Of too many counters those that the most generators report are kept, because a forger could invent some.
        """

        def bounded(values: Iterable[float]) -> Any:
            return min(sum(values), MAX_TOTAL)

        alive = [entry.stats for entry in self.alive(now)]
        reporters = Counter(name for stats in alive for name in stats.counters)
        names = sorted(reporters, key=lambda name: (-reporters[name], name))[:MAX_COUNTERS]
        counters = {name: bounded(stats.counters.get(name, 0) for stats in alive) for name in names}
        by_running = itertools.zip_longest(*(stats.decoded for stats in alive), fillvalue=Decoded())
        decoded = tuple(Decoded(*map(bounded, zip(*map(msgspec.structs.astuple, parts)))) for parts in by_running)
        sums = {name: bounded(getattr(stats, name) for stats in alive) for name in GENERATOR_TOTALS}
        return GeneratorStats(**sums, decoded=decoded, counters=counters)

    def as_dicts(self, now: float) -> list[dict[str, Any]]:
        return [
            {
                "id": e.generator_id,
                "host": e.host,
                "backend": e.backend,
                "active": list(e.active) if e.active else None,
                "seen_s_ago": now - e.seen_at,
                "alive": self.is_alive(e, now),
                "stats": msgspec.to_builtins(e.stats),
                "refused": dict(e.refused),
                "quarantined": e.quarantined or e.failing.line(now),
                "trouble": e.trouble,
                "too_slow": self.paces.why(e.generator_id),
                "foreign_requests": e.num_foreign,
            }
            for e in self._entries.values()
        ]
