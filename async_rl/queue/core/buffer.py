"""Every request that the queue answers, as a method: a pure state machine without sockets, threads or a clock.

A learner's attach, announcements, takes and acks enter, and generators' lease requests, heartbeats and groups; time
comes as ``now``, in seconds. Leases, batches, verdicts and statistics leave. Every method may be repeated with the same
arguments. The server's handlers call it; tests drive it event by event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import LineageError, QueueError
from async_rl.queue.core import batches, ingest, lease_scheduler, persistence, report
from async_rl.queue.core.admission import BufferSettings
from async_rl.queue.core.batches import TakenPayload
from async_rl.queue.core.evals import EvalBook, EvalKey, Evaluation, EvaluationRecord, Row
from async_rl.queue.core.ingest import GroupSummary
from async_rl.queue.core.leases import GeneratorTable, LeaseTable
from async_rl.queue.core.prompt_stream import PromptStream
from async_rl.queue.core.state import LearnerSide, QueueState
from async_rl.queue.core.stored_groups import SnapshotRefs, snapshot_key
from async_rl.queue.messages import (
    Acked,
    Announcement,
    FailureCause,
    GeneratorStats,
    LeasesGranted,
    NotReady,
    QueueStats,
    StepAck,
    Verdict,
)
from async_rl.queue.storage.journal import Changes, Kind
from async_rl.queue.storage.payloads import MemoryPayloads, Payload, PayloadRef, PayloadStore
from async_rl.records import Lease, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EvalPayloads:
    """One finished evaluation, still encoded: every row's prompt and payload. A row that failed has None as payload."""

    dataset: str
    step: int
    answers: tuple[tuple[Prompt, Payload | None], ...]


class Buffer:
    """The queue. ``instance`` makes the lease ids of two server processes of one run differ.

    ``data_digest`` identifies the training rows. ``payloads`` stores the payloads (if unset, in memory). ``changes``
    collects the records for the journal (if unset, none are collected).
    """

    def __init__(
        self, settings: BufferSettings, rows: Sequence[Row], stream: PromptStream, *, data_digest: str = "",
        instance: str = "0", payloads: PayloadStore | None = None, changes: Changes | None = None,
    ) -> None:  # fmt: skip
        if stream.num_rows != len(rows):
            raise ValueError(f"expected a stream over the {len(rows)} rows, got one over {stream.num_rows}")
        payloads = MemoryPayloads() if payloads is None else payloads
        changes = Changes(is_wanted=False) if changes is None else changes
        self._state = QueueState(
            settings=settings,
            rows=rows,
            stream=stream,
            data_digest=data_digest,
            instance=instance,
            payloads=payloads,
            changes=changes,
            leases=LeaseTable(settings.lease_timeout_s, changes),
            generators=GeneratorTable(settings.generator_timeout_s),
            evals=EvalBook(changes, payloads),
            snapshot_refs=SnapshotRefs(changes),
        )

    def save(self) -> bytes:
        """The part of the state that is not recorded in ``changes``, encoded for the journal."""
        return persistence.save(self._state)

    def load(
        self, entries: Mapping[Kind, Mapping[str, Any]], saved: bytes, eval_rows: Mapping[str, Sequence[Row]],
        eval_samplings: Mapping[str, Sampling], now: float,
    ) -> list[PayloadRef]:  # fmt: skip
        """Load the state that an earlier process saved into this empty buffer. Return the refs of the payloads in use.

        Raises:
            QueueError: the state can't be decoded.
        """
        return persistence.load(self._state, entries, saved, eval_rows, eval_samplings, now)

    # The learner.

    def attach(
        self,
        lineage: str,
        parent: str,
        fork_version: int,
        step: int,
        num_steps: int,
        snapshot: bytes | None,
        now: float,
    ) -> None:
        """Attach a learner: void all leases, and restore the queue from ``snapshot`` (if None, empty it).

        Raises:
            LineageError: this lineage was already replaced by a newer one.
            QueueError: the snapshot is damaged, or of another step, version or data set.
        """
        state = self._state
        state.at(now)
        if state.learner is not None and lineage == state.learner.lineage:
            return
        if lineage in state.old_lineages:
            raise LineageError(f"lineage {lineage} no longer owns the queue; a newer learner has taken over")
        found = None
        if snapshot is not None:
            found = persistence.read_snapshot(state, snapshot, step=step, version=fork_version)
        state.old_lineages |= {parent} if parent else set()
        state.old_lineages |= {state.learner.lineage} if state.learner is not None else set()
        state.void_leases()
        persistence.restore(state, found)
        state.start_learner(lineage, step, num_steps, fork_version, None if found is None else found.state.learner)
        state.revision += 1

    def announce(self, announcement: Announcement) -> None:
        """Note that a version is published. Versions older than the newest announced one are ignored.

        Raises:
            LineageError: another learner owns the queue. QueueError: the version was not acked yet.
        """
        learner = self._state.attached(announcement.lineage)
        if announcement.version > learner.version:
            raise QueueError(
                f"expected an acked version, at most {learner.version}, got an announcement of {announcement.version}"
            )
        newest = learner.announced_version
        if newest is None or announcement.version >= newest:
            learner.announcement = announcement
            self._state.revision += 1

    def evaluate(
        self, dataset: str, step: int, rows: Sequence[Row], num_samples: int, sampling: Sampling, min_version: int,
        exclusive: bool,
    ) -> None:  # fmt: skip
        """Start an evaluation. If ``exclusive``, no training lease is granted until it is done."""
        record = EvaluationRecord(dataset, step, num_samples, min_version, exclusive)
        evaluation = Evaluation(record, rows, sampling)
        if evaluation.key not in self._state.received_evals and self._state.evals.add(evaluation):
            self._state.revision += 1

    def eval_results(self, lineage: str, received: Collection[EvalKey] = ()) -> list[EvalPayloads]:
        """Return the finished evaluations. Those listed in ``received`` are deleted."""
        state = self._state
        state.attached(lineage)
        for key in received:
            evaluation = state.evals.confirm(key)
            if evaluation is None:
                continue
            state.received_evals.add(key)
            for answer in evaluation.answers.values():
                if answer.ref is not None:
                    state.eval_ledger.deliver(answer.rollouts, answer.tokens)
            state.revision += 1
        for evaluation in state.evals.finished:
            evaluation.delivered = True
        return [self._payloads(evaluation) for evaluation in state.evals.finished]

    def eval_wait(self, lineage: str) -> str:
        """The reason why no evaluation can be delivered yet; empty if a finished one has not been delivered."""
        state = self._state
        state.attached(lineage)
        if any(not e.delivered for e in state.evals.finished) or not state.evals.unfinished:
            return ""
        return report.who_samples(state) + "; ".join(e.progress_line for e in state.evals.unfinished)

    def take(
        self, lineage: str, step: int, version: int, num_groups: int, now: float
    ) -> tuple[TakenPayload, ...] | NotReady:
        """Return exactly ``num_groups`` groups for the next step.

        ``step`` steps are done, and the learner trains the groups first at ``version``.

        Raises:
            LineageError: another learner owns the queue.
            QueueError: ``step`` is not the next step, or ``version`` is not the acked one.
        """
        self.expire(now)
        return batches.take(self._state, lineage, step, version, num_groups)

    def lacks_groups(self, lineage: str, step: int, num_groups: int) -> bool:
        """Whether too few groups are ready for this take. Much cheaper than ``take``, which builds statistics."""
        return batches.lacks_groups(self._state, lineage, step, num_groups)

    def ack(self, ack: StepAck, now: float) -> Acked:
        """Record that the taken step was trained, or that its optimizer step was skipped.

        Raises:
            LineageError: another learner owns the queue.
            QueueError: the step is not the taken one, the version or bound is out of range, or the counts don't add up.
        """
        self._state.at(now)
        snapshot = batches.ack(self._state, ack)
        return Acked(self.stats(), snapshot)

    def checkpoint_committed(self, lineage: str, step: int) -> None:
        """Release the snapshots older than ``step``: the checkpoint after ``step`` steps is complete.

        Raises:
            LineageError: another learner owns the queue.
        """
        state = self._state
        state.attached(lineage)
        key = snapshot_key(lineage, step)
        if state.snapshot_refs.has_snapshot(key):
            state.release_refs(state.snapshot_refs.release_all_but(key))
            state.revision += 1

    def finish(self, lineage: str, now: float) -> None:
        """End the run: drop the remaining groups as unused, and notify the generators."""
        state = self._state
        state.at(now)
        learner = state.attached(lineage)
        if learner.finished:
            return
        for group in state.set_taken(()):
            state.drop_group(group, "taken", "unused_at_end")
        state.end_training()
        for active in state.leases:
            state.lose_lease(active, "unused_at_end", requeue=False)
        persistence.drop_undelivered(state, "unused_at_end")
        learner.finished = True
        state.revision += 1

    def snapshot(self, lineage: str, now: float) -> bytes:
        """Encode the queue for a checkpoint of the acked step. Taken groups count as queued."""
        state = self._state
        state.at(now)
        learner = state.attached(lineage)
        state.revision += 1
        return persistence.snapshot(state, learner)

    # The generators.

    def hello(self, generator_id: str, host: str, backend: str, now: float, *, replaces: str | None = None) -> None:
        """Register a generator. The one that it ``replaces`` is dead: expire that one's leases."""
        state = self._state
        state.at(now)
        entry = state.generators.seen(generator_id, state.now)
        entry.host, entry.backend = host, backend
        if replaces is not None and replaces != generator_id:
            for active in [active for active in state.leases if active.generator_id == replaces]:
                state.lose_lease(active, "expired", stop_sampling=False)
            state.generators.remove(replaces)
            state.revision += 1

    def lease(self, generator_id: str, active: tuple[str, int], max_leases: int, now: float) -> LeasesGranted:
        """Grant up to ``max_leases`` leases to a generator that samples with ``active`` (lineage, version)."""
        state = self._state
        state.at(now)
        state.generators.seen(generator_id, state.now).active = active
        self.expire(now)
        return lease_scheduler.grant(state, generator_id, active, max_leases)

    def heartbeat(
        self, generator_id: str, progress: Mapping[str, int], stats: GeneratorStats, now: float
    ) -> tuple[str, ...]:
        """Record a generator's progress by lease. Return the ids of the leases that it must stop sampling."""
        state = self._state
        state.at(now)
        state.generators.seen(generator_id, state.now).stats = stats
        void = state.generators.pop_cancelled(generator_id)
        for lease_id, tokens in progress.items():
            active = state.leases.get(lease_id)
            if active is None or active.generator_id != generator_id:
                void.add(lease_id)
            else:
                state.leases.grow(lease_id, tokens, state.now)
        self.expire(now)
        return tuple(sorted(void | state.generators.pop_cancelled(generator_id)))

    def pop_cancelled(self, generator_id: str) -> tuple[str, ...]:
        """Return the cancelled leases of which this generator was not notified yet, and mark them as sent."""
        return tuple(sorted(self._state.generators.pop_cancelled(generator_id)))

    def put(self, generator_id: str, group: GroupSummary, payload: Payload, now: float) -> Verdict:
        """Take in a returned group: its summary, and its ``payload``, which is stored."""
        return self.put_explained(generator_id, group, payload, now)[0]

    def put_explained(
        self, generator_id: str, group: GroupSummary, payload: Payload, now: float
    ) -> tuple[Verdict, str]:
        """As ``put``, and also return the reason if the group was refused."""
        self._state.at(now)
        self._state.generators.seen(generator_id, self._state.now)
        return ingest.receive(self._state, generator_id, group, payload)

    def fail(self, generator_id: str, lease_id: str, cause: FailureCause, now: float) -> Verdict:
        """Close a lease that the generator returned unsampled."""
        self._state.at(now)
        self._state.generators.seen(generator_id, self._state.now)
        return ingest.fail(self._state, generator_id, lease_id, cause)

    def refuse(self, generator_id: str, lease_id: str, now: float) -> Verdict:
        """Refuse a returned group that can't be decoded, and requeue its prompt."""
        self._state.at(now)
        active = self._state.leases.get(lease_id)
        if active is not None and active.generator_id == generator_id:
            self._state.lose_lease(active, "refused", stop_sampling=False)
        return "refused"

    def goodbye(self, generator_id: str, now: float) -> None:
        """Remove a generator that shuts down, and requeue its leases at once."""
        state = self._state
        state.at(now)
        for active in state.leases:
            if active.generator_id == generator_id:
                state.give_back(active)
        state.generators.remove(generator_id)
        state.revision += 1

    # Time and reports.

    def expire(self, now: float) -> int:
        """Expire leases without progress, and stop waits under ``on_stale = "wait"`` that are over.

        Return the number of expired leases.
        """
        state = self._state
        state.at(now)
        batches.stop_waiting(state)
        expired = state.leases.expired(state.now)
        for active in expired:
            state.lose_lease(active, "expired")
        state.generators.forget_silent(state.now)
        return len(expired)

    @property
    def next_deadline(self) -> float | None:
        """The time at which ``expire`` next has something to do; None if there is none."""
        deadlines = (self._state.leases.next_deadline, batches.wait_deadline(self._state))
        return min((d - self._state.clock_ahead_s for d in deadlines if d is not None), default=None)

    @property
    def revision(self) -> int:
        """A counter that grows with every change that may answer a waiting request."""
        return self._state.revision

    @property
    def settings(self) -> BufferSettings:
        return self._state.settings

    @property
    def learner(self) -> LearnerSide | None:
        """The attached learner, for reading."""
        return self._state.learner

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self._state.learner is not None and self._state.learner.finished

    def require(self, lineage: str) -> None:
        """Check that ``lineage`` owns the queue. Raises LineageError; without a learner QueueError."""
        self._state.attached(lineage)

    def lease_of(self, lease_id: str) -> Lease | None:
        """The lease in flight with this id; None if there is none."""
        active = self._state.leases.get(lease_id)
        return None if active is None else active.lease

    def alive_generators(self, now: float) -> tuple[str, ...]:
        """The ids of the generators that sent a message recently."""
        self._state.at(now)
        return tuple(entry.generator_id for entry in self._state.generators.alive(self._state.now))

    def generators_to_notify(self) -> tuple[str, ...]:
        """The ids of the generators that were not yet notified of all their cancelled leases."""
        return tuple(self._state.generators.to_notify())

    def check(self) -> None:
        """Raises AssertionError if a ledger's identity is broken."""
        report.check(self._state)

    def ledger_file(self) -> dict[str, Any]:
        """The content of ``ledger.json``. ``broken`` names an identity that does not hold (a bug of ours)."""
        return report.ledger_file(self._state)

    def stats(self) -> QueueStats:
        """Queue statistics at time ``state.now``, set by the latest call."""
        return report.stats(self._state)

    def status(self, now: float) -> dict[str, Any]:
        """The full status of the queue for people, as plain data."""
        self._state.at(now)
        return report.status(self._state)

    def _payloads(self, evaluation: Evaluation) -> EvalPayloads:
        read = self._state.payloads.read
        places = [evaluation.answers[row].ref for row in range(len(evaluation.rows))]
        pairs = ((evaluation.prompt(row), read(p) if p is not None else None) for row, p in enumerate(places))
        return EvalPayloads(*evaluation.key, tuple(pairs))
