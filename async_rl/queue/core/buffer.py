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
    """One finished evaluation, still encoded: every row's prompt and payload, None where it could not be sampled."""

    dataset: str
    step: int
    answers: tuple[tuple[Prompt, Payload | None], ...]


class Buffer:
    """The queue. ``instance`` tells the lease ids of two server processes of one run apart.

    ``data_digest`` names the training rows. ``payloads`` keeps the payloads (if unset: in memory), and ``changes``
    collects what the journal is to write (if unset: nothing).
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
        """Everything small that is not noted in ``changes``, for the journal."""
        return persistence.save(self._state)

    def load(
        self, entries: Mapping[Kind, Mapping[str, Any]], saved: bytes, eval_rows: Mapping[str, Sequence[Row]],
        eval_samplings: Mapping[str, Sampling], now: float,
    ) -> list[PayloadRef]:  # fmt: skip
        """Go on from what an earlier process wrote down, on an empty buffer; the places of the payloads in use.

        Raises:
            QueueError: it is not understood.
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
        """A learner starts: leases become void, and the queue is what ``snapshot`` says (none: empty).

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
        """A version is published. Older ones than the newest announced are ignored.

        Raises:
            LineageError: of another learner. QueueError: the version was not acked yet.
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
        """Ask for an evaluation. ``exclusive``: no training lease until it is done."""
        record = EvaluationRecord(dataset, step, num_samples, min_version, exclusive)
        evaluation = Evaluation(record, rows, sampling)
        if evaluation.key not in self._state.received_evals and self._state.evals.add(evaluation):
            self._state.revision += 1

    def eval_results(self, lineage: str, received: Collection[EvalKey] = ()) -> list[EvalPayloads]:
        """Finished evaluations; those that the learner says it has are forgotten."""
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
        """What the learner's evaluations wait for; empty once one is finished that was not yet handed over."""
        state = self._state
        state.attached(lineage)
        if any(not e.delivered for e in state.evals.finished) or not state.evals.unfinished:
            return ""
        return report.who_samples(state) + "; ".join(e.progress_line for e in state.evals.unfinished)

    def take(
        self, lineage: str, step: int, version: int, num_groups: int, now: float
    ) -> tuple[TakenPayload, ...] | NotReady:
        """Exactly ``num_groups`` groups for the step after ``step`` done ones, trained first at ``version``.

        Raises:
            LineageError: of another learner. QueueError: not the next step, or not the acked version.
        """
        self.expire(now)
        return batches.take(self._state, lineage, step, version, num_groups)

    def lacks_groups(self, lineage: str, step: int, num_groups: int) -> bool:
        """Whether this take could only be told to wait for more groups. Far cheaper than ``take``, whose answer has
        a reason and statistics.
        """
        return batches.lacks_groups(self._state, lineage, step, num_groups)

    def ack(self, ack: StepAck, now: float) -> Acked:
        """The taken step is trained, or its optimizer step was skipped.

        Raises:
            LineageError: of another learner.
            QueueError: the step is not the taken one, the version or bound is out of range, or the counts don't add up.
        """
        self._state.at(now)
        snapshot = batches.ack(self._state, ack)
        return Acked(self.stats(), snapshot)

    def checkpoint_committed(self, lineage: str, step: int) -> None:
        """The checkpoint after ``step`` steps is whole: nobody goes back behind it, so older snapshots are released.

        Raises:
            LineageError: of another learner.
        """
        state = self._state
        state.attached(lineage)
        key = snapshot_key(lineage, step)
        if state.snapshot_refs.has_snapshot(key):
            state.release_refs(state.snapshot_refs.release_all_but(key))
            state.revision += 1

    def finish(self, lineage: str, now: float) -> None:
        """The run is over: what is left is unused, and generators are told."""
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
        """The queue as bytes for a checkpoint of the acked step. What is taken counts as queued."""
        state = self._state
        state.at(now)
        learner = state.attached(lineage)
        state.revision += 1
        return persistence.snapshot(state, learner)

    # The generators.

    def hello(self, generator_id: str, host: str, backend: str, now: float, *, replaces: str | None = None) -> None:
        """A generator introduces itself. One that it ``replaces`` is dead: its leases have expired."""
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
        """Up to ``max_leases`` leases for a generator that samples with ``active`` (lineage, version)."""
        state = self._state
        state.at(now)
        state.generators.seen(generator_id, state.now).active = active
        self.expire(now)
        return lease_scheduler.grant(state, generator_id, active, max_leases)

    def heartbeat(
        self, generator_id: str, progress: Mapping[str, int], stats: GeneratorStats, now: float
    ) -> tuple[str, ...]:
        """A generator's progress by lease; the ids it is to stop sampling."""
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
        """Leases that this generator was not yet told to stop sampling."""
        return tuple(sorted(self._state.generators.pop_cancelled(generator_id)))

    def put(self, generator_id: str, group: GroupSummary, payload: Payload, now: float) -> Verdict:
        """A returned group: what was read of it, and its ``payload``, which is kept."""
        return self.put_explained(generator_id, group, payload, now)[0]

    def put_explained(
        self, generator_id: str, group: GroupSummary, payload: Payload, now: float
    ) -> tuple[Verdict, str]:
        """``put``, with a line that says why a group was refused."""
        self._state.at(now)
        self._state.generators.seen(generator_id, self._state.now)
        return ingest.receive(self._state, generator_id, group, payload)

    def fail(self, generator_id: str, lease_id: str, cause: FailureCause, now: float) -> Verdict:
        """A lease given back unsampled."""
        self._state.at(now)
        self._state.generators.seen(generator_id, self._state.now)
        return ingest.fail(self._state, generator_id, lease_id, cause)

    def refuse(self, generator_id: str, lease_id: str, now: float) -> Verdict:
        """A return that can't be decoded; its prompt comes again."""
        self._state.at(now)
        active = self._state.leases.get(lease_id)
        if active is not None and active.generator_id == generator_id:
            self._state.lose_lease(active, "refused", stop_sampling=False)
        return "refused"

    def goodbye(self, generator_id: str, now: float) -> None:
        """A generator leaves in good order; its leases are given out again at once."""
        state = self._state
        state.at(now)
        for active in state.leases:
            if active.generator_id == generator_id:
                state.give_back(active)
        state.generators.remove(generator_id)
        state.revision += 1

    # Time and reports.

    def expire(self, now: float) -> int:
        """Give up leases without progress, and waiting for leases that a step would make stale; how many leases."""
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
        """Before then ``expire`` has nothing to do; None if it never has."""
        deadlines = (self._state.leases.next_deadline, batches.wait_deadline(self._state))
        return min((d - self._state.clock_ahead_s for d in deadlines if d is not None), default=None)

    @property
    def revision(self) -> int:
        """Grows with every change that may answer a waiting request."""
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
        """Raises LineageError, or QueueError without a learner, unless ``lineage`` owns the queue."""
        self._state.attached(lineage)

    def lease_of(self, lease_id: str) -> Lease | None:
        """A lease in flight."""
        active = self._state.leases.get(lease_id)
        return None if active is None else active.lease

    def alive_generators(self, now: float) -> tuple[str, ...]:
        """Generators that were seen lately."""
        self._state.at(now)
        return tuple(entry.generator_id for entry in self._state.generators.alive(self._state.now))

    def generators_to_notify(self) -> tuple[str, ...]:
        """Generators with leases that they were not yet told to stop sampling."""
        return tuple(self._state.generators.to_notify())

    def check(self) -> None:
        """Raises AssertionError if a ledger's identity is broken."""
        report.check(self._state)

    def ledger_file(self) -> dict[str, Any]:
        """What ``ledger.json`` holds. ``broken`` names an identity that does not hold (a bug of ours)."""
        return report.ledger_file(self._state)

    def stats(self) -> QueueStats:
        """The queue at the last ``now`` it was told."""
        return report.stats(self._state)

    def status(self, now: float) -> dict[str, Any]:
        """Everything a person wants to see, as plain data."""
        self._state.at(now)
        return report.status(self._state)

    def _payloads(self, evaluation: Evaluation) -> EvalPayloads:
        read = self._state.payloads.read
        places = [evaluation.answers[row].ref for row in range(len(evaluation.rows))]
        pairs = ((evaluation.prompt(row), read(p) if p is not None else None) for row, p in enumerate(places))
        return EvalPayloads(*evaluation.key, tuple(pairs))
