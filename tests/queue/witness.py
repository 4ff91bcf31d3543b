"""A queue server as seen from outside: the state, the records that its journal would keep, and what must hold.

Nothing is read but the state's public face and those records. ``world.World`` adds the clients, and tells the books
where prompts ended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from async_rl.config.data import CurriculumConfig
from async_rl.config.queue import OnStale
from async_rl.net.wire import pack_plain
from async_rl.queue.core import persistence
from async_rl.queue.core.admission import LearnerSide
from async_rl.queue.core.groups import GroupSummary
from async_rl.queue.core.pace import RunAheadSetting
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import PersistedState, QueueState, decode_state, encode_state
from async_rl.queue.messages import Verdict
from async_rl.queue.storage.journal import Changes, Kind, unpack
from async_rl.queue.storage.payloads import MemoryPayloads, PayloadRef
from tests.queue import builders
from tests.queue.builders import SAMPLING, rows

EVAL_ROWS = rows(2)
WORST_CASE = builders.settings().reserved_bytes


@dataclass(frozen=True, slots=True)
class Knobs:
    """One run's settings. ``max_groups``: worst cases that fit into ``queue.max_bytes``."""

    on_stale: OnStale = "drop"
    max_staleness: int = 1
    updates: int = 1
    is_filtered: bool = True
    refill: bool = True
    max_groups: float = 100.0
    max_attempts: int = 4
    num_rows: int = 12
    epochs: int | None = None
    num_steps: int = 20
    run_ahead: RunAheadSetting = "bound"
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass(slots=True)
class Books:
    """Where prompts ended, in the history that survives."""

    trained: set[int] = field(default_factory=set)
    filtered: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    too_long: set[int] = field(default_factory=set)

    def copy(self) -> Books:
        return Books(set(self.trained), set(self.filtered), set(self.skipped), set(self.too_long))

    @property
    def ended(self) -> list[int]:
        return [*self.trained, *self.filtered, *self.skipped, *self.too_long]


class Witness:
    """One server at a time, and the payload store. ``sent`` is what came back for every lease."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.settings = builders.settings(
            max_staleness=knobs.max_staleness, updates_per_batch=knobs.updates, on_stale=knobs.on_stale,
            filter_range=(0.01, 0.99) if knobs.is_filtered else None, refill=knobs.refill,
            max_bytes=int(knobs.max_groups * WORST_CASE), max_attempts=knobs.max_attempts, max_filtered=10_000,
            run_ahead=knobs.run_ahead,
            lease_timeout_s=10.0, wait_s=7.0,
        )  # fmt: skip
        self.now = 0.0
        self.num_servers = 0
        self.books = Books()
        self.sent: dict[str, tuple[GroupSummary, bytes]] = {}
        self.start_server()

    def start_server(self, payloads: MemoryPayloads | None = None) -> None:
        """An empty one, with the payloads of the last or none."""
        self.num_servers += 1
        self.payloads = MemoryPayloads() if payloads is None else payloads
        self.entries: dict[Kind, dict[str, Any]] = {kind: {} for kind in get_args(Kind)}
        self.state = self._new_state()
        self._remember()

    def _new_state(self) -> QueueState:
        self.changes = Changes()
        stream = PromptStream(self.knobs.num_rows, seed=0, epochs=self.knobs.epochs, curriculum=self.knobs.curriculum)
        return QueueState(
            self.settings, rows(self.knobs.num_rows), stream, instance=str(self.num_servers), payloads=self.payloads,
            changes=self.changes,
        )  # fmt: skip

    def _remember(self) -> None:
        self._revision, self._small = self.state.revision, self._saved()

    def _saved(self) -> PersistedState:
        """As it comes back from a disk; without the clock, which runs while nothing changes."""
        return replace(decode_state(encode_state(self.state)), now=0.0)

    def reload(self, clock: float) -> None:
        """The server dies; another, whose clock may be any, goes on from its records."""
        entries: dict[Kind, dict[str, Any]] = {kind: written(fields) for kind, fields in self.entries.items()}
        saved, depth, payloads = encode_state(self.state), self.state.stats().depth, self.payloads
        curriculum = self.state.stream.curriculum
        self.now = clock
        self.start_server(payloads)
        places = persistence.load(self.state, entries, saved, {"test": EVAL_ROWS}, {"test": SAMPLING}, self.now)
        assert len(set(places)) == len(places) == len(payloads)
        for change in self.changes.drain():
            assert change.fields is not None
            assert written(change.fields) == entries[change.kind][change.key]
        self.entries = entries
        assert decode_state(encode_state(self.state)) == decode_state(saved)
        assert self.state.stats().depth == depth
        assert self.state.stream.curriculum.rates() == curriculum.rates()
        assert self.state.stream.curriculum.places == curriculum.places
        self._remember()
        self.settle()

    @property
    def learner(self) -> LearnerSide:
        assert self.state.learner is not None
        return self.state.learner

    @property
    def ledger(self) -> dict[str, Any]:
        return self.state.stats().ledger["groups"]

    @property
    def held_ids(self) -> frozenset[str]:
        """Groups that are queued or taken."""
        return frozenset(lease_id for lease_id, fields in self.entries["group"].items() if fields["is_live"])

    @property
    def lease_versions(self) -> list[int]:
        """The oldest version that a token of a training lease can have."""
        leases = [f for f in self.entries["lease"].values() if f["evaluation"] is None]
        return [max(f["version"], f["min_version"]) for f in leases]

    @property
    def is_blocked(self) -> bool:
        """Whether an evaluation keeps training from leases."""
        answered = Counter(key.rpartition(",")[0] + "]" for key in self.entries["answer"])
        return any(f["exclusive"] and answered[key] < 2 for key, f in self.entries["evaluation"].items())

    def settle(self) -> None:
        """Write down what changed, as the server does, and hold the state against the books."""
        self.is_sound = False
        changes = self.changes.drain()
        small = self._saved()
        if self.state.revision == self._revision:
            # The server writes nothing down, and wakes nobody, while the revision stands still.
            assert not changes
            assert small == self._small
        for change in changes:
            if change.fields is None:
                self.entries[change.kind].pop(change.key, None)
            else:
                self.entries[change.kind][change.key] = written(change.fields)
        self._revision, self._small = self.state.revision, small
        self.state.check()
        self._check_prompts(small)
        self._check_payloads()
        self.is_sound = True

    def _check_prompts(self, small: PersistedState) -> None:
        """Every prompt drawn is at one place, or ended in one way."""
        held = [fields["group"]["position"] for fields in self.entries["group"].values() if fields["is_live"]]
        in_flight = [f["position"] for f in self.entries["lease"].values() if f["evaluation"] is None]
        places = [*small.cursor.requeued, *held, *in_flight, *self.books.ended]
        assert len(set(places)) == len(places), "a prompt is at two places"
        assert all(position < small.cursor.position for position in places)
        dropped = small.ledger.groups.dropped
        excluded = dropped["poison"] + dropped["too_slow"] + dropped["unused_at_end"]
        assert len(places) + excluded == small.cursor.position, "a prompt got lost"
        still_named = {*small.cursor.requeued, *held, *in_flight, *small.last_excluded}
        assert self.entries["place"].keys() <= {str(position) for position in still_named}

    def _check_payloads(self) -> None:
        """Every payload is needed, and readable; those in use and those to come fit into ``queue.max_bytes``."""
        groups, answers = self.entries["group"], self.entries["answer"].values()
        pinned = {lease_id for pin in self.entries["snapshot"].values() for lease_id in pin["lease_ids"]}
        assert groups.keys() == self.held_ids | pinned
        assert len(self.payloads) == len(groups) + sum(answer["ref"] is not None for answer in answers)
        for lease_id in pinned:
            assert self.payloads.read(PayloadRef(**groups[lease_id]["group"]["ref"])) == self.sent[lease_id][1]
        in_use = sum(groups[lease_id]["group"]["ref"]["length"] for lease_id in self.held_ids)
        num_training = len(self.lease_versions)
        assert in_use + num_training * WORST_CASE <= self.settings.queue.max_bytes

    def foretold(self, facts: GroupSummary) -> Verdict:
        """What a returned group is to be told."""
        lease = self.entries["lease"].get(facts.lease_id)
        version = self.learner.version
        if lease is None or lease["generator_id"] != facts.generator_id:
            fate = self.entries["closed_lease"].get(facts.lease_id, {}).get("status")
            late: dict[Any, Verdict] = {"returned": "duplicate", "rolled_back": "old_lineage"}
            return late.get(fate, "unknown_lease")
        if facts.unfit or facts.num_rollouts != 2 or facts.newest_version > version:
            return "refused"
        if facts.kind == "eval":
            return "eval_done" if facts.oldest_version >= lease["min_version"] else "stale"
        bound = facts.newest_version if self.settings.queue.on_stale == "mask" else facts.oldest_version
        if version + self.settings.updates_per_batch - 1 - bound > self.settings.queue.max_staleness:
            return "stale"
        return "filtered" if self.knobs.is_filtered and self.knobs.refill and facts.accuracy != 1 else "queued"


def written(plain: Any) -> dict[str, Any]:
    """As it comes back from a disk."""
    return unpack(pack_plain(plain))
