"""The queue as a pure state machine: no socket, no thread, no clock of its own (time comes as ``now``, seconds).

What enters: a learner's attach, announcements, takes and acks; generators' lease requests, heartbeats and groups.
What leaves: leases, batches, verdicts, statistics. Every method may be repeated with the same arguments. The server
calls it; the tests drive it event by event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import LineageError, QueueError
from async_rl.queue import grants, report, restore, returns
from async_rl.queue.admission import BufferSettings
from async_rl.queue.evals import EvalKey, Evaluation, Row
from async_rl.queue.leases import GeneratorTable, LeaseTable
from async_rl.queue.messages import (
    Acked,
    Announcement,
    FailureCause,
    GeneratorStats,
    LeasesGranted,
    NotReady,
    QueueStats,
    TrainedFacts,
    Verdict,
)
from async_rl.queue.state import LearnerSide, QueueState
from async_rl.queue.stream import PromptStream
from async_rl.records import Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class TakenBody:
    """One taken group, still encoded."""

    prompt: Prompt
    queued_s: float
    arrival_version: int
    masked: bool
    body: bytes


@dataclass(frozen=True, slots=True)
class EvalBodies:
    """One finished evaluation, still encoded: every row's prompt and body, None where it could not be sampled."""

    dataset: str
    step: int
    answers: tuple[tuple[Prompt, bytes | None], ...]


class Buffer:
    """The queue. ``instance`` tells the lease ids of two server processes of one run apart."""

    def __init__(
        self, settings: BufferSettings, rows: Sequence[Row], stream: PromptStream, *, instance: str = "0"
    ) -> None:
        if stream.num_rows != len(rows):
            raise ValueError(f"expected a stream over the {len(rows)} rows, got one over {stream.num_rows}")
        self._state = QueueState(
            settings=settings,
            rows=rows,
            stream=stream,
            instance=instance,
            leases=LeaseTable(settings.lease_timeout_s),
            generators=GeneratorTable(settings.generator_timeout_s),
        )

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
        saved = None if snapshot is None else restore.read(state, snapshot, step=step, version=fork_version)
        state.old_lineages |= {parent} if parent else set()
        state.old_lineages |= {state.learner.lineage} if state.learner is not None else set()
        restore.void_leases(state)
        restore.restore(state, saved)
        state.learner = LearnerSide(lineage, step, num_steps, version=fork_version, fork_version=fork_version)
        state.drop_too_old(state.learner)
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
        evaluation = Evaluation((dataset, step), rows, num_samples, sampling, min_version, exclusive)
        if self._state.evals.add(evaluation):
            self._state.revision += 1

    def eval_results(self, lineage: str, received: Collection[EvalKey] = ()) -> list[EvalBodies]:
        """Finished evaluations; those that the learner says it has are forgotten."""
        state = self._state
        state.attached(lineage)
        for key in received:
            evaluation = state.evals.confirm(key)
            for answer in evaluation.answers.values() if evaluation is not None else ():
                if answer is not None:
                    state.eval_ledger.deliver(answer.rollouts, answer.tokens)
                    state.revision += 1
        for evaluation in state.evals.finished:
            evaluation.delivered = True
        return [_bodies(evaluation) for evaluation in state.evals.finished]

    def eval_wait(self, lineage: str) -> str:
        """What the learner's evaluations wait for; empty once one is finished that was not yet handed over."""
        state = self._state
        state.attached(lineage)
        if any(not e.delivered for e in state.evals.finished) or not state.evals.unfinished:
            return ""
        return report.who_samples(state) + "; ".join(e.progress_line for e in state.evals.unfinished)

    def take(
        self, lineage: str, step: int, version: int, num_groups: int, now: float
    ) -> tuple[TakenBody, ...] | NotReady:
        """Exactly ``num_groups`` groups for the step after ``step`` done ones, trained first at ``version``.

        Raises:
            LineageError: of another learner. QueueError: not the next step, or not the acked version.
        """
        state = self._state
        state.at(now)
        learner = state.attached(lineage)
        if (step, version) != (learner.step, learner.version):
            raise QueueError(
                f"expected a take of step {learner.step} at version {learner.version}, as acked, got step {step} at "
                f"version {version}"
            )
        if not learner.taken:
            self.expire(now)
            state.drop_too_old(learner)
            if len(state.queued) < num_groups or learner.finished or not learner.steps_left:
                return report.not_ready(state, learner, num_groups)
            learner.taken = tuple(sorted(state.queued.values(), key=lambda g: g.order)[:num_groups])
            for group in learner.taken:
                del state.queued[group.lease_id]
                state.ledger.take(group.rollouts, group.tokens)
            state.revision += 1
        return tuple(
            TakenBody(state.prompt(g.position), state.now - g.arrived_at, g.arrival_version, g.masked, g.body)
            for g in learner.taken
        )

    def ack(
        self, lineage: str, step: int, new_version: int, facts: TrainedFacts, *, snapshot: bool, now: float
    ) -> Acked:
        """The taken step is trained (or its optimizer step was skipped), and the learner is at ``new_version``.

        Raises:
            LineageError: of another learner.
            QueueError: the step is not the taken one, the version can't be, or the facts don't add up.
        """
        state = self._state
        state.at(now)
        learner = state.attached(lineage)
        if learner.acked is not None and learner.acked[0] == step:
            return learner.acked[1]
        if step != learner.step or not learner.taken:
            raise QueueError(f"expected an ack of step {learner.step}, taken before, got one of step {step}")
        newest = learner.version + (state.settings.updates_per_batch if facts.stepped else 0)
        if not learner.version + facts.stepped <= new_version <= newest:
            raise QueueError(
                f"expected version {learner.version + facts.stepped}..{newest} after step {step}, got {new_version}"
            )
        self._settle(learner, facts)
        learner.step, learner.version, learner.taken = step + 1, new_version, ()
        state.filtered_since_step = state.filtered_right_since_step = 0
        state.drop_too_old(learner)
        if not learner.steps_left:
            state.end_training()
        state.revision += 1
        body = self.snapshot(lineage, now) if snapshot else None
        learner.acked = (step, Acked(self.stats(), body))
        return learner.acked[1]

    def finish(self, lineage: str, now: float) -> None:
        """The run is over: what is left is unused, and generators are told."""
        state = self._state
        state.at(now)
        learner = state.attached(lineage)
        if learner.finished:
            return
        for group in learner.taken:
            state.drop_group(group, "taken", "unused_at_end")
        learner.taken = ()
        state.end_training()
        restore.drop_undelivered(state, "unused_at_end")
        learner.finished = True
        state.revision += 1

    def snapshot(self, lineage: str, now: float) -> bytes:
        """The queue as bytes for a checkpoint of the acked step. What is taken counts as queued."""
        state = self._state
        state.at(now)
        learner = state.attached(lineage)
        return restore.save(state, learner)

    # The generators.

    def hello(self, generator_id: str, host: str, backend: str, now: float) -> None:
        """A generator introduces itself."""
        self._state.at(now)
        entry = self._state.generators.seen(generator_id, self._state.now)
        entry.host, entry.backend = host, backend

    def lease(self, generator_id: str, active: tuple[str, int], max_leases: int, now: float) -> LeasesGranted:
        """Up to ``max_leases`` leases for a generator that samples with ``active`` (lineage, version)."""
        state = self._state
        state.at(now)
        state.generators.seen(generator_id, state.now).active = active
        self.expire(now)
        return grants.grant(state, generator_id, active, max_leases)

    def heartbeat(
        self, generator_id: str, progress: Mapping[str, int], stats: GeneratorStats, now: float
    ) -> tuple[str, ...]:
        """A generator's progress by lease; the ids it is to stop sampling."""
        state = self._state
        state.at(now)
        state.generators.seen(generator_id, state.now).stats = stats
        void = state.generators.pop_cancelled(generator_id)
        for lease_id, tokens in progress.items():
            held = state.leases.get(lease_id)
            if held is None or held.generator_id != generator_id:
                void.add(lease_id)
            else:
                state.leases.grow(lease_id, tokens, state.now)
        self.expire(now)
        return tuple(sorted(void | state.generators.pop_cancelled(generator_id)))

    def pop_cancelled(self, generator_id: str) -> tuple[str, ...]:
        """Leases that this generator was not yet told to stop sampling."""
        return tuple(sorted(self._state.generators.pop_cancelled(generator_id)))

    def put(self, generator_id: str, group: Group, body: bytes, now: float) -> Verdict:
        """A returned group, decoded and as ``body``, which is kept."""
        return self.put_explained(generator_id, group, body, now)[0]

    def put_explained(self, generator_id: str, group: Group, body: bytes, now: float) -> tuple[Verdict, str]:
        """``put``, with a line that says why a group was refused."""
        self._state.at(now)
        self._state.generators.seen(generator_id, self._state.now)
        return returns.receive(self._state, generator_id, group, body)

    def fail(self, generator_id: str, lease_id: str, cause: FailureCause, now: float) -> Verdict:
        """A lease given back unsampled."""
        self._state.at(now)
        self._state.generators.seen(generator_id, self._state.now)
        return returns.fail(self._state, generator_id, lease_id, cause)

    def refuse(self, generator_id: str, lease_id: str, now: float) -> Verdict:
        """A return that can't be decoded; its prompt comes again."""
        self._state.at(now)
        held = self._state.leases.get(lease_id)
        if held is not None and held.generator_id == generator_id:
            self._state.lose_lease(held, "refused", stop_sampling=False)
        return "refused"

    def goodbye(self, generator_id: str, now: float) -> None:
        """A generator leaves in good order; its leases are given out again at once."""
        state = self._state
        state.at(now)
        for held in state.leases:
            if held.generator_id == generator_id:
                state.give_back(held)
        state.generators.remove(generator_id)
        state.revision += 1

    # Time and reports.

    def expire(self, now: float) -> int:
        """Give up leases without progress; how many."""
        state = self._state
        state.at(now)
        expired = state.leases.expired(state.now)
        for held in expired:
            state.lose_lease(held, "expired")
        state.generators.forget_silent(state.now)
        return len(expired)

    @property
    def next_deadline(self) -> float | None:
        """Before then ``expire`` has nothing to do; None without leases."""
        return self._state.leases.next_deadline

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

    def alive_generators(self, now: float) -> tuple[str, ...]:
        """Generators heard of lately."""
        self._state.at(now)
        return tuple(entry.generator_id for entry in self._state.generators.alive(self._state.now))

    def generators_to_tell(self) -> tuple[str, ...]:
        """Generators with leases that they were not yet told to stop sampling."""
        return tuple(self._state.generators.with_cancelled())

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

    def _settle(self, learner: LearnerSide, facts: TrainedFacts) -> None:
        """Book the taken groups: trained as the facts say, or dropped with a skipped optimizer step."""
        state, taken = self._state, learner.taken
        if facts.stepped:
            rollouts, tokens = sum(g.rollouts for g in taken), sum(g.tokens for g in taken)
            state.ledger.train(len(taken), rollouts, tokens, facts)
        for group in taken:
            state.attempts.pop(group.position, None)
            if facts.stepped:
                state.count_outcome("trained", group)
                state.group_bytes -= len(group.body)
            else:
                state.drop_group(group, "taken", "step_skipped")


def _bodies(evaluation: Evaluation) -> EvalBodies:
    answers = [evaluation.answers[row] for row in range(len(evaluation.rows))]
    pairs = tuple((evaluation.prompt(i), a.body if a is not None else None) for i, a in enumerate(answers))
    return EvalBodies(*evaluation.key, pairs)
