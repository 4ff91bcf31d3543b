"""The whole state of the queue, and changes that several requests share: end a lease, drop a group, requeue a prompt.

The server has one ``QueueState``. The functions of ``learner_requests`` and ``generator_requests`` change it, and
``QueueState.expire`` ends leases as time passes. ``encode_state`` writes the part of it that outlives the process,
``PersistedState``, for the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np

from async_rl.errors import LineageError, QueueError
from async_rl.net.wire import pack_plain
from async_rl.queue.core import ledger as ledgers
from async_rl.queue.core.admission import LearnerSide, QueueSettings
from async_rl.queue.core.evaluations import EvalBook
from async_rl.queue.core.failures import EvalKey, failures_dict
from async_rl.queue.core.generators import GeneratorTable
from async_rl.queue.core.groups import GroupRecord, GroupSummary, ReadyGroups, SnapshotRefs, StoredGroup
from async_rl.queue.core.learning_signal import SignalWatch
from async_rl.queue.core.leases import ActiveLease, LeaseTable
from async_rl.queue.core.ledger import Ledger, Outcomes
from async_rl.queue.core.pace import RunAhead
from async_rl.queue.core.prompts import PromptStream, Row, StreamCursor, rows_by_source
from async_rl.queue.core.retries import PersistedAttempts, Retries
from async_rl.queue.messages import DropCause, Failure, QueueStats
from async_rl.queue.storage.journal import Changes
from async_rl.queue.storage.payloads import MemoryPayloads, PayloadStore
from async_rl.records import Prompt


@dataclass(slots=True, kw_only=True)
class PersistedState(PersistedAttempts):
    """The part of the queue's state that outlives the server process. Journal and snapshots have all these fields.

    Attributes:
        data_digest: a digest of the training rows. A snapshot made with other rows is not restored.
        learner: the attached learner; None before the first.
        old_lineages: the learners that no longer own the queue.
        cursor: the place in the stream of prompts.
        filtered_since_step: the number of groups filtered since the learner's last step.
        filtered_right_since_step: the number of those whose accuracy was at or above the filter's upper end.
        filtered_own_since_step: the number of those that only the user's own filter did not keep.
        ledger: the counts of training groups, rollouts and tokens.
        eval_ledger: the same counts for evaluations.
        outcomes: sums over groups by how they ended.
        received_evals: the evaluations whose answers the learner has received.
        num_damaged: the number of groups whose stored bytes were damaged.
        signal: counts the groups that train nothing.
        quarantines: the generators that were quarantined last, each with a sentence that says why.
    """

    data_digest: str = ""
    learner: LearnerSide | None = None
    old_lineages: set[str] = field(default_factory=set)
    cursor: StreamCursor = field(default_factory=StreamCursor)
    filtered_since_step: int = 0
    filtered_right_since_step: int = 0
    filtered_own_since_step: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    eval_ledger: Ledger = field(default_factory=lambda: Ledger("delivered"))
    outcomes: Outcomes = field(default_factory=Outcomes)
    received_evals: set[EvalKey] = field(default_factory=set)
    num_damaged: int = 0
    signal: SignalWatch = field(default_factory=SignalWatch)
    quarantines: dict[str, str] = field(default_factory=dict)


_LOOK_AGAIN_S = 0.1
"""How long after each other to look whether a row has come, while one is awaited."""
_FIELDS = tuple(persisted.name for persisted in fields(PersistedState))


@dataclass(slots=True, eq=False)
class QueueState(PersistedState):
    """The queue's whole state.

    Attributes:
        rows: the training rows; empty if their source is the user's own, and each row is in the place of its prompt.
        stream: the order in which the rows are sampled.
        instance: a secret of the server process. Lease ids depend on it, so that they can't be guessed.
        payloads: the store of the groups' bytes.
        changes: collects the records to write to the journal. By default it collects nothing.
        taken: the groups that the learner has taken for its step.
        waits_since: under ``on_stale = "wait"``, the time since which a complete batch has waited for leases; None if
            no batch waits.
        run_ahead: how far sampling runs ahead of the learner.
        revision: a number that grows with every change, so that waiting requests are tried again.
        clock_ahead_s: the seconds by which the queue's clock is ahead of the caller's.
        vocab_size: limit on the token ids of returned groups. None if unknown.
        damage: the number of damaged groups by file, until the server has logged them.
        news: what the server must log about failed leases and slow generators.
        is_short_of_bytes: whether ``queue.max_bytes`` has kept a generator from a lease that the bound allowed.
    """

    settings: QueueSettings
    rows: Sequence[Row]
    stream: PromptStream
    instance: str = "0"
    payloads: PayloadStore = field(default_factory=MemoryPayloads)
    changes: Changes = field(default_factory=lambda: Changes(is_wanted=False))
    leases: LeaseTable = field(init=False)
    generators: GeneratorTable = field(init=False)
    evals: EvalBook = field(init=False)
    retries: Retries = field(init=False)
    snapshot_refs: SnapshotRefs = field(init=False)
    queued: ReadyGroups = field(default_factory=ReadyGroups)
    taken: tuple[StoredGroup, ...] = ()
    taken_bytes: int = 0
    waits_since: float | None = None
    run_ahead: RunAhead = field(init=False)
    num_leases: int = 0
    revision: int = 0
    clock_ahead_s: float = 0.0
    vocab_size: int | None = None
    damage: Counter[str] = field(default_factory=Counter)
    _sources: Mapping[str, np.ndarray] = field(init=False)
    news: list[str] = field(default_factory=list)
    is_short_of_bytes: bool = False

    def __post_init__(self) -> None:
        self.stream.cursor, self.stream.curriculum.changes = self.cursor, self.changes
        self._sources = rows_by_source(row.source for row in self.rows) if self.stream.curriculum.is_on else {}
        self.leases = LeaseTable(self.settings.queue.lease_timeout_s, self.changes)
        self.generators = GeneratorTable(self.settings.generator_timeout_s, self.changes)
        self.evals = EvalBook(self.changes, self.payloads)
        self.retries = Retries(self, self.settings, self.stream, self.leases, self.generators, self.evals, self.news)
        self.run_ahead = RunAhead(self.settings.run_ahead, self.settings.groups_per_step)
        self.snapshot_refs = SnapshotRefs(self.changes)

    def adopt(self, saved: PersistedState) -> None:
        """Replace all persisted fields of this state by those of ``saved``."""
        for name in _FIELDS:
            setattr(self, name, getattr(saved, name))
        self.stream.cursor = self.cursor

    def set_taken(self, groups: tuple[StoredGroup, ...]) -> tuple[StoredGroup, ...]:
        """Replace the groups that the learner has taken by ``groups``. Return the previous groups."""
        before, self.taken = self.taken, groups
        self.taken_bytes = sum(group.ref.disk_bytes for group in groups)
        if self.learner is not None:
            self.learner.taken_ids = tuple(group.lease_id for group in groups)
        return before

    def set_clock(self, now: float) -> None:
        """Set the queue's clock to the time ``now`` of the caller's clock. The queue's clock never runs backwards.

        The queue's clock outlives processes, and is ``clock_ahead_s`` ahead of the caller's.
        """
        self.now = max(self.now, now + self.clock_ahead_s)

    def expire(self, now: float) -> int:
        """End the leases whose progress has not grown for too long, and return their number.

        Under ``on_stale = "wait"``, also end the wait of a batch that has waited for ``queue.wait_s``.
        """
        self.set_clock(now)
        self._stop_waiting()
        expired = self.leases.expired(self.now)
        for active in expired:
            self.lose_lease(active, "expired", counts=self._counts_expired(active))
        self.revision += self.generators.forget_silent(self.now)
        # The requests of generators that may try a lease now are waiting for a change.
        self.revision += self.generators.due_trials(self.now)
        self.revision += self.run_ahead.has_grown(self.now)
        self.revision += self.stream.has_grown()
        return len(expired)

    @property
    def next_deadline(self) -> float | None:
        """The time, on the caller's clock, at which ``expire`` must be called next; None if it need not be called."""
        deadlines = (
            self.leases.next_deadline, self._wait_deadline, self.generators.next_trial,
            self.run_ahead.next_change(self.now), self.now + _LOOK_AGAIN_S if self.stream.is_starved else None,
        )  # fmt: skip
        return min((d - self.clock_ahead_s for d in deadlines if d is not None), default=None)

    @property
    def finished(self) -> bool:
        """Whether the learner has ended the run."""
        return self.learner is not None and self.learner.finished

    def attached(self, lineage: str) -> LearnerSide:
        """Return the attached learner, after a check that ``lineage`` is its lineage.

        Raises:
            LineageError: another learner owns the queue.
            QueueError: no learner is attached.
        """
        if self.learner is None:
            raise QueueError(
                f"expected an attached learner, got a request of lineage {lineage}, which is not attached: this queue "
                f"server started with an empty queue; start the learner again from its checkpoint"
            )
        if lineage != self.learner.lineage:
            raise LineageError(
                f"lineage {lineage} no longer owns the queue: a newer learner, lineage {self.learner.lineage}, has "
                f"taken over; stop this learner"
            )
        return self.learner

    @property
    def group_bytes(self) -> int:
        """The size in bytes of all groups that are queued or taken."""
        return self.queued.num_bytes + self.taken_bytes

    def prompt(self, position: int) -> Prompt:
        index, epoch = self.stream.locate(position)
        place = self.stream.curriculum.places.get(position)
        row = (place and place.row) or self.rows[index]
        return Prompt(position, index, epoch, row.messages, row.reward_data, row.source)

    def _counts_expired(self, active: ActiveLease) -> bool:
        """Return whether a lease without progress counts against its prompt, which may have killed its generator.

        If the generator is alive, the lease has failed.
        """
        entry = self.generators.get(active.generator_id)
        if entry is None or not self.generators.is_alive(entry, self.now):
            return self.retries.counts(active)
        detail = f"a lease showed no progress for {self.leases.timeout_s:g} s (queue.lease_timeout_s)"
        return self.retries.note_failed_lease(active, Failure("no_progress", detail, detail, is_transient=True))

    def lose_lease(
        self,
        active: ActiveLease,
        cause: DropCause,
        *,
        tokens: int = 0,
        stop_sampling: bool = True,
        requeue: bool = True,
        counts: bool | None = True,
    ) -> None:
        """End a lease that gave no usable group. Requeue its prompt, or exclude the prompt after too many attempts.

        Args:
            cause: the reason, under which the ledger counts the group.
            tokens: the number of tokens that the generator returned anyway.
            stop_sampling: whether to notify the generator that it must stop.
            requeue: False gives up the row of an evaluation at once.
            counts: whether it counts as a failed attempt of the prompt (``Retries.counts``). None if it
                was no attempt, because it ends for a reason outside of the lease.
        """
        rollouts, prompt, name = active.lease.group_size, active.lease.prompt, active.generator_id
        if stop_sampling:
            self.generators.cancel(active)
        if active.evaluation is not None:
            evaluation = self.evals.get(active.evaluation)
            is_given_up = evaluation is not None and self.retries.lose_row(
                evaluation, prompt.row, cause, name, counts=counts, requeue=requeue
            )
            final: DropCause = "poison" if is_given_up and requeue else cause
            self.leases.close(active.lease.lease_id, final)
            self.eval_ledger.drop("in_flight", final, rollouts, tokens)
        else:
            if cause in ("cancelled", "stale"):
                self.generators.note_pace(active, tokens, self.now, is_returned=cause == "stale")
            final = self.retries.lose_prompt(prompt.position, cause, name, counts=counts)
            self.leases.close(active.lease.lease_id, final)
            self.ledger.drop("in_flight", final, rollouts, tokens)
            if cause == "cancelled":
                # Its answers are at least as long as in the last heartbeat. Their reward is unknown.
                counted = active.counted_progress
                self.outcomes.add("cancelled", rollouts=rollouts, tokens=counted, reward=0.0, accuracy=0.0)
        self.revision += 1

    def drop_group(
        self, group: StoredGroup, source: ledgers.Place, cause: DropCause, *, requeue: bool = False, counts: bool = True
    ) -> None:
        """Count a group as dropped for ``cause``, and delete it.

        The caller has removed it from the ready or taken groups. ``source`` is where the ledger has counted it. If
        ``requeue``, its prompt is sampled again, or excluded if it was too slow too
        often. ``counts`` says whether this was an attempt of the prompt.
        """
        final = cause
        if requeue and counts:
            final = self.retries.lose_prompt(group.position, cause, group.generator_id)
        elif requeue:
            self.stream.requeue(group.position)
        self.ledger.drop(source, final, group.num_rollouts, group.num_tokens)
        self.count_outcome("dropped", group)
        self.forget_group(group)
        self.revision += 1

    def forget_group(self, group: StoredGroup) -> None:
        """Delete the record and the bytes of a group that is neither ready nor taken.

        If a snapshot refers to the group, keep both, and mark the record as not live.
        """
        if group.lease_id in self.snapshot_refs:
            self.changes.put("group", group.lease_id, GroupRecord(group, is_live=False))
        else:
            self.changes.delete("group", group.lease_id)
            self.payloads.release(group.ref)

    def is_live(self, lease_id: str) -> bool:
        """Return whether the group of the lease ``lease_id`` is ready or taken."""
        return lease_id in self.queued or any(group.lease_id == lease_id for group in self.taken)

    def release_refs(self, groups: Iterable[StoredGroup]) -> None:
        """Delete those of ``groups`` that are neither ready nor taken. No snapshot may need them any more."""
        for group in groups:
            if not self.is_live(group.lease_id):
                self.forget_group(group)

    def count_outcome(self, outcome: ledgers.Outcome, group: GroupSummary | StoredGroup) -> None:
        self.outcomes.add(
            outcome,
            rollouts=group.num_rollouts,
            tokens=group.num_tokens,
            reward=group.reward,
            accuracy=group.accuracy,
        )

    def cancel_left_behind(self, learner: LearnerSide) -> None:
        """End the leases in flight whose groups will be too old once the learner has trained the batch that it took.

        Their prompts are requeued. Without this method such leases would keep generators busy in vain, and would count
        as groups in flight when new leases are granted. At a staleness bound of 1 that cost a tenth of the steps/s.
        If the optimizer step is skipped later, the leases were ended needlessly.
        """
        if self.settings.queue.on_stale != "mask":
            for active in self.leases.training_older_than(self.settings.oldest_after_step(learner.version)):
                self.lose_lease(active, "cancelled")

    def stats(self) -> QueueStats:
        """Return statistics of the queue at the time of its clock."""
        alive = self.generators.alive(self.now)
        return QueueStats(
            depth=len(self.queued),
            bytes=self.group_bytes + self.evals.num_bytes,
            in_flight=self.ledger.groups.in_flight,
            num_generators=len(alive),
            generators=self.generators.total(self.now),
            ledger=self.ledger_dict(),
            prompts_too_long=self.prompts_too_long,
            epoch=self.stream.epoch,
            metrics={**self._curriculum_metrics(), **self.run_ahead.metrics(self.now)},
            reports={e.generator_id: msgspec.structs.replace(e.stats, decoded=(), counters={}) for e in alive},
        )

    def _curriculum_metrics(self) -> dict[str, float]:
        stream = self.stream
        if not stream.curriculum.is_on:
            return {}
        return {
            "curriculum/passed_aside": stream.cursor.aside.total(),
            "curriculum/passed_thinned": stream.cursor.thinned.total(),
            **stream.curriculum.metrics(stream.row_epochs, self._sources),
        }

    def ledger_dict(self) -> dict[str, Any]:
        """Return the counts of ``ledger.json`` and ``async-rl status``, as plain data.

        They say where all groups, rollouts and tokens of training are (in flight, queued, trained, dropped, ...), the
        same for evaluations under ``eval``, and under ``outcomes`` the tokens and rewards by how groups ended.
        """
        return {
            **self.ledger.as_dict(),
            "eval": self.eval_ledger.as_dict(),
            "outcomes": self.outcomes.as_dict(),
            "failures": failures_dict(self.failed_places.values()),
        }

    def check_totals(self) -> None:
        """Check that both ledgers add up, and that they equal the totals of the tables of groups, leases and prompts.

        Raises:
            AssertionError: a number differs.
        """
        self.ledger.check()
        self.eval_ledger.check()
        groups, tokens = self.ledger.groups, self.ledger.tokens
        held_tokens = self.queued.num_tokens + sum(g.num_tokens for g in self.taken)
        _compare(
            {
                "queued": (groups.queued, len(self.queued)),
                "taken": (groups.taken, len(self.taken)),
                "in_flight": (groups.in_flight, self.leases.num_training),
                "tokens": (tokens.queued + tokens.taken, held_tokens),
                "prompts": (self.stream.position, self._num_prompts()),
            }
        )

    def check(self) -> None:
        """Check all totals, also those that are kept for speed, against the groups and leases. Slow with many groups.

        Raises:
            AssertionError: a total is wrong, or a prompt got lost.
        """
        self.check_totals()
        queued, leases = list(self.queued), list(self.leases)
        _compare(
            {
                "queued bytes": (self.queued.num_bytes, sum(g.ref.disk_bytes for g in queued)),
                "bytes": (self.group_bytes, sum(g.ref.disk_bytes for g in (*queued, *self.taken))),
                "queued tokens": (self.queued.num_tokens, sum(g.num_tokens for g in queued)),
                "reserved": (self.leases.reserved, sum(lease.reserved for lease in leases)),
                "training leases": (self.leases.num_training, sum(lease.evaluation is None for lease in leases)),
            }
        )

    def _num_prompts(self) -> int:
        """Return the number of prompts that were drawn from the stream. A prompt that was requeued counts once.

        The number is the sum of all counters that say where a prompt is now, or how it ended.
        """
        groups = self.ledger.groups
        here = self.stream.num_requeued + groups.in_flight + groups.queued + groups.taken
        ended = ("poison", "too_slow", "step_skipped", "policy_frozen", "unused_at_end")
        return here + groups.done + groups.filtered + self.prompts_too_long + sum(groups.dropped[c] for c in ended)

    @property
    def _wait_deadline(self) -> float | None:
        """The time at which a waiting batch stops waiting for leases; None if no batch waits."""
        return None if self.waits_since is None else self.waits_since + self.settings.queue.wait_s

    def _stop_waiting(self) -> None:
        """If a batch has waited for ``queue.wait_s``, end the leases that it waited for."""
        deadline = self._wait_deadline
        if self.learner is None or deadline is None or self.now < deadline:
            return
        self.cancel_left_behind(self.learner)
        # Leases granted after the batch was complete are new enough, so the next take does not wait again.
        self.waits_since = None


def persisted(state: QueueState) -> PersistedState:
    """Return the fields of ``state`` that outlive the server process. They are not copied."""
    return PersistedState(**{name: getattr(state, name) for name in _FIELDS})


def encode_state(state: QueueState) -> bytes:
    """Return, as bytes, the part of the state that every commit of the journal writes as a whole."""
    return pack_plain(persisted(state))


def read_counter(kind: Any, plain: Any) -> Any:
    """Return a ``Counter``, the only type of a persisted field that msgspec does not know."""
    return Counter(plain)


_STATE_DECODER = msgspec.msgpack.Decoder(PersistedState, dec_hook=read_counter)


def decode_state(data: bytes) -> PersistedState:
    """Return the state from the bytes that ``encode_state`` returned.

    Raises:
        msgspec.MsgspecError: ``data`` is not such a state.
    """
    return _STATE_DECODER.decode(data)


def stop_reason(state: QueueState) -> str:
    """Return the reason why the run can't continue; empty if it can."""
    if stop := outage_reason(state):
        return stop
    if stop := state.stream.why_stopped():
        return stop
    if state.filtered_since_step >= state.settings.max_filtered:
        right, own = state.filtered_right_since_step, state.filtered_own_since_step
        wrong = state.filtered_since_step - right - own
        by_own = f"{own} by queue.filter_function, " if own else ""
        return (
            f"{state.filtered_since_step} groups were filtered since the last step, as many as queue.max_filtered "
            f"allows: {by_own}{right} had a mean accuracy at or above the upper end of queue.filter_range, {wrong} "
            f"at or below the lower end, or equal rewards. The data is too easy or too hard for this model, or the "
            f"reward misreads its answers: read some (eval/ in the run directory has those of evaluations), then "
            f"change data.train or reward.type. If rewards differ while the accuracy does not, return a graded "
            f"accuracy, or set queue.filter_range = []"
        )
    full = [epoch for epoch, count in state.excluded.items() if count >= state.stream.num_rows]
    if full:
        first = full[0] * state.stream.num_rows
        which = f"positions {first} to {first + state.stream.num_rows - 1}" if state.stream.has_sources else ""
        return (
            f"every prompt of {which or f'epoch {full[0]}'} was excluded ({state.prompts_too_long} were longer than "
            f"sampling.max_prompt_tokens = {state.settings.sampling.max_prompt_tokens}, others failed or were too "
            f"slow queue.max_attempts times); see the generators' logs"
        )
    return state.generators.why_nobody(state.now)


def outage_reason(state: QueueState) -> str:
    """Return the reason why the run stops because all leases fail; empty if it goes on."""
    outage = state.retries.outage
    if outage is None:
        return ""
    return outage.diagnosis(state.now, state.settings.queue.max_outage_s, is_proven=state.retries.is_code_proven)


def _compare(totals: Mapping[str, tuple[int, int]]) -> None:
    wrong = {name: pair for name, pair in totals.items() if pair[0] != pair[1]}
    if wrong:
        raise AssertionError(
            f"expected the queue's counters to equal the totals of its tables, got other (counted, stored) pairs: "
            f"{wrong}; this is a bug in async-rl, please report it"
        )
