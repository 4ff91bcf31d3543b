"""The generators that the queue knows: who owns an id, what each did, and which get no leases.

Clients choose generator ids themselves, so everything that is stored by generator id is in ``GeneratorTable``, which
limits their number. All times are in seconds of the queue's clock.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from async_rl.errors import QueueError, WireError
from async_rl.queue.core.failures import Failing, Outage, outage_of
from async_rl.queue.core.leases import ActiveLease
from async_rl.queue.core.pace import Paces
from async_rl.queue.messages import (
    DOCTOR,
    MAX_COUNTERS,
    MAX_TOTAL,
    AnswerProbe,
    Decoded,
    GeneratorStats,
    LeasesGranted,
)
from async_rl.queue.storage.journal import Changes

MAX_GENERATORS = 4096
QUARANTINE_OF = 100
"""``queue.max_refused_share`` is a share of this many groups, the last that a generator returned."""
TROUBLE_LOG_S = 10.0
"""Minimum interval between two log lines about the problems of one generator."""
_TIMES_FORGOTTEN = 10
"""A generator is removed after a silence of this many times the one after which it does not count as alive."""


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


class GrantedRecord(msgspec.Struct, frozen=True, gc=False):
    """A reply with leases as the journal stores it, so that a restarted server can repeat it."""

    request_id: str
    lease_ids: list[str]


@dataclass(slots=True)
class GeneratorEntry:
    """What the queue knows about one generator.

    Attributes:
        seen_at: the time of its last message.
        owner: the client that may use its id.
        peer: the routing id of its connection; None if unknown.
        granted: the id of its last lease request, and the reply; None if there is none.
        sent: its (lineage, version) at its last lease request, and the version that the reply asked it to activate, or
            None; None before the first reply.
        probe_answer: its newest answer to the learner's probe. It is not in the journal, because after a restart of the
            server the learner sends a new probe with a later version.
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
    peer: bytes | None = None
    granted: tuple[str, LeasesGranted] | None = None
    sent: tuple[tuple[str, int], int | None] | None = None
    probe_answer: AnswerProbe | None = None
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

    def record(self) -> GeneratorRecord:
        return GeneratorRecord(self.owner, dict(self.refused), list(self.returned), self.quarantined)

    def why_failing(self, now: float) -> str:
        """Return a sentence if it is quarantined because its leases fail where others succeed; else empty text."""
        why = self.failing.describe(now)
        return why and f"generator {self.generator_id!r} is quarantined, while others succeed: {why}"

    @property
    def causes(self) -> str:
        """Text that lists the causes of its refused groups, each with the number of groups."""
        return ", ".join(f"{cause}: {number}" for cause, number in self.refused.most_common())


class GeneratorTable:
    """The known generators, by id. There are at most ``MAX_GENERATORS``.

    A generator counts as alive until it was silent for ``timeout_s``, and is removed after ten times as long, or when
    it says goodbye or is replaced. ``paces`` says how fast they sample.
    """

    def __init__(self, timeout_s: float, changes: Changes) -> None:
        self._timeout_s, self._changes = timeout_s, changes
        self._entries: dict[str, GeneratorEntry] = {}
        self._by_peer: dict[bytes, GeneratorEntry] = {}
        self._to_notify: set[str] = set()
        self._failing: set[str] = set()
        """The generators that are quarantined because their leases fail, and maybe some that no longer are."""
        self._forget_at = 0.0
        self.paces = Paces()

    def seen(self, generator_id: str, now: float) -> GeneratorEntry:
        """Return the generator with this id, which has sent a message at ``now``. Add it if it is new.

        Raises:
            QueueError: it is new, and the table is full.
        """
        entry = self._entries.get(generator_id)
        if entry is None:
            if len(self._entries) >= MAX_GENERATORS:
                raise QueueError(
                    f"expected at most {MAX_GENERATORS} generators, got one more: {len(self._entries)} are "
                    f"registered already (`async-rl status` lists them). A generator that is silent for "
                    f"{_TIMES_FORGOTTEN * self._timeout_s:.0f} s is removed; try again later"
                )
            entry = self._entries[generator_id] = GeneratorEntry(generator_id, now)
        entry.seen_at = max(now, entry.seen_at)
        return entry

    def get(self, generator_id: str) -> GeneratorEntry | None:
        return self._entries.get(generator_id)

    # Connections.

    def check_peer(self, peer: bytes, generator_id: str) -> None:
        """Check that the connection ``peer`` belongs to no generator, or to this one.

        Otherwise one peer could fill the table, and get every notice once for each of its ids.

        Raises:
            WireError: it belongs to another generator.
        """
        entry = self._by_peer.get(peer)
        if entry is not None and entry.generator_id != generator_id:
            raise WireError(
                f"expected messages of generator {entry.generator_id!r} on this connection, got one of "
                f"{generator_id!r}; open one connection for each generator"
            )

    def bind(self, entry: GeneratorEntry, peer: bytes) -> None:
        """Make ``peer`` the connection to which this generator's notices are sent."""
        if entry.peer != peer:
            self._unbind(entry)
            entry.peer = peer
            self._by_peer[peer] = entry

    def using(self, peer: bytes) -> GeneratorEntry | None:
        """Return the generator that uses the connection ``peer``; None if there is none."""
        return self._by_peer.get(peer)

    @property
    def peers(self) -> list[bytes]:
        """The routing ids of the connections of all generators."""
        return list(self._by_peer)

    def _unbind(self, entry: GeneratorEntry) -> None:
        if entry.peer is not None:
            self._by_peer.pop(entry.peer, None)
        entry.peer = None

    # Replies to lease requests.

    def grant(self, entry: GeneratorEntry, request_id: str, reply: LeasesGranted) -> None:
        """Keep the reply to the generator's last lease request, in case the request is repeated.

        Each has a record of its own, because all of a thousand generators would be too much to write at every commit.
        """
        entry.granted = request_id, reply
        lease_ids = [lease.lease_id for lease in reply.leases]
        self._changes.put("granted", entry.generator_id, GrantedRecord(request_id, lease_ids))

    def forget_granted(self) -> None:
        """Delete the kept replies to lease requests, because a new learner has attached.

        They may name versions that it does not have.
        """
        for entry in self._entries.values():
            self._forget_granted(entry)

    def _forget_granted(self, entry: GeneratorEntry) -> None:
        if entry.granted is not None:
            self._changes.delete("granted", entry.generator_id)
        entry.granted = entry.sent = None

    def probe_answers(self, lineage: str, since: int) -> dict[str, bytes]:
        """Return each generator's newest probe answer of version ``since`` or later, encoded, by generator id."""
        answers = {name: entry.probe_answer for name, entry in self._entries.items()}
        return {
            name: answer.answer
            for name, answer in answers.items()
            if answer is not None and answer.lineage == lineage and answer.version >= since
        }

    # The journal.

    def save(self, entry: GeneratorEntry) -> None:
        """Write a generator's entry to the journal."""
        self._changes.put("generator", entry.generator_id, entry.record())

    def restore(self, generator_id: str, record: GeneratorRecord, now: float) -> None:
        """Add a generator that the journal has. It does not count as alive until it sends a message."""
        entry = self._entries[generator_id] = GeneratorEntry(generator_id, now - 2 * self._timeout_s, record.owner)
        entry.refused.update(record.refused)
        entry.returned.extend(record.returned)
        entry.quarantined = record.quarantined

    def remove(self, generator_id: str) -> None:
        entry = self._entries.pop(generator_id, None)
        if entry is not None:
            self._unbind(entry)
            self._forget_granted(entry)
            self._changes.delete("generator", generator_id)
        self.paces.remove(generator_id)
        self._to_notify.discard(generator_id)

    def belongs_to(self, entry: GeneratorEntry, owner: Owner, now: float) -> bool:
        """Return whether ``owner`` may use the id of the generator ``entry``, or replace that generator.

        A generator without a key may be replaced by any other when it is not alive, because a generator gets a new
        secret when it restarts.
        """
        return entry.owner == owner or not (entry.owner.has_key or self.is_alive(entry, now))

    # Who is alive, and who samples.

    def forget_silent(self, now: float) -> int:
        """Remove the generators that have been silent for ten times ``timeout_s``, and return their number.

        It is called on every request, so it looks at all generators only when one may have to be removed.
        """
        if now < self._forget_at:
            return 0
        forget_s = _TIMES_FORGOTTEN * self._timeout_s
        silent = [entry for entry in self._entries.values() if now - entry.seen_at > forget_s]
        for entry in silent:
            self.remove(entry.generator_id)
        self._forget_at = min((e.seen_at for e in self._entries.values()), default=now) + forget_s
        return len(silent)

    def alive(self, now: float) -> list[GeneratorEntry]:
        """Return the generators that are alive. A doctor is none, because it takes no leases."""
        return list(self._alive(now))

    def _alive(self, now: float) -> Iterator[GeneratorEntry]:
        return (e for e in self._entries.values() if self.is_alive(e, now) and e.backend != DOCTOR)

    def alive_clients(self, now: float) -> Iterator[GeneratorEntry]:
        """Return an iterator over the generators and the doctors that are alive."""
        return (entry for entry in self._entries.values() if self.is_alive(entry, now))

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
        failures = {name: self._entries[name].failing for name in self._failing if name in self._entries}
        self._failing = {name for name, failing in failures.items() if failing.retry_at is not None}
        return [failures[name] for name in self._failing if not (failures[name].trial or failures[name].is_due)]

    @property
    def next_trial(self) -> float | None:
        """The earliest time at which a generator that is quarantined for failed leases may try one; None if none."""
        return min((f.retry_at for f in self._await_trial() if f.retry_at is not None), default=None)

    def due_trials(self, now: float) -> int:
        """Return the number of generators that may try a lease since ``now``. Each is returned once."""
        due = [f for f in self._await_trial() if f.retry_at is not None and f.retry_at <= now]
        for failing in due:
            failing.is_due = True
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

    # What they are told, and what they report.

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

    def to_notify(self) -> list[GeneratorEntry]:
        """Return the generators with cancelled leases that they have not been told about."""
        return [self._entries[generator_id] for generator_id in self._to_notify]

    def total(self, now: float) -> GeneratorStats:
        """Return the decode steps and counters of all generators that are alive, summed. None exceeds ``MAX_TOTAL``.

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
        return GeneratorStats(decoded=decoded, counters=counters)

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
                "quarantined": e.quarantined or e.failing.describe(now),
                "trouble": e.trouble,
                "too_slow": self.paces.why(e.generator_id),
                "foreign_requests": e.num_foreign,
            }
            for e in self._entries.values()
        ]
