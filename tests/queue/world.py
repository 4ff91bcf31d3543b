"""A run around the real state: generators, learners, checkpoints, and queue servers that die alone.

Events go in; after each ``witness.Witness`` holds the state against the books. ``events`` draws them at random, and
the tests of one history at a time call them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import pytest

from async_rl.errors import LineageError
from async_rl.queue.core import generator_requests, learner_requests, persistence
from async_rl.queue.core.groups import GroupSummary
from async_rl.queue.messages import (
    Failure,
    GeneratorStats,
    LeasesGranted,
    NotReady,
    StepAck,
    Taken,
    TrainedCounts,
    Verdict,
)
from async_rl.queue.storage.payloads import Payload
from async_rl.records import Lease
from tests.queue import builders
from tests.queue.builders import SAMPLING
from tests.queue.witness import EVAL_ROWS, WORST_CASE, Books, Knobs, Witness

GENERATORS: tuple[str, ...] = ("g0", "g1", "g2")

Ages = Literal["old", "mixed", "new"]
"""Sampled by the version that the lease was asked with, from it to the active one, or by the active one."""
Return = Literal["good", "right", "wrong", "failed", "unfit", "edge", "ancient", "future", "full", "huge"]
"""``right`` and ``wrong`` are filtered. Three lie: ``edge`` was sampled by the oldest version that the next step may
train, ``ancient`` by version 0, ``future`` by one that is not there yet. ``full`` is of the size that was reserved,
``huge`` above it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``held`` are the groups that the snapshot names."""

    lineage: str
    step: int
    version: int
    snapshot: bytes
    books: Books
    held: frozenset[str]


@dataclass(slots=True)
class Generator:
    """What a generator believes: the weights that it has, and its leases. ``asked`` is the version asked with."""

    active: tuple[str, int]
    leases: dict[str, Lease] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)


class World(Witness):
    """One run of 2 groups a step and 2 rollouts a group. Every event ends in ``settle``."""

    def __init__(self, knobs: Knobs) -> None:
        super().__init__(knobs)
        self.generators = {name: Generator(("line-0", 0)) for name in GENERATORS}
        self.num_lineages, self.old_lineages = 0, list[str]()
        self.num_evals = 0
        self.checkpoint, self.written = None, list[Checkpoint]()
        self.taken: list[str] | None = None
        self.acked: tuple[int, int, TrainedCounts, bytes | None] | None = None
        self.staleness: list[int] = []
        learner_requests.attach(self.state, "line-0", "", 0, 0, knobs.num_steps, None, self.now)
        self.announce()

    @property
    def lineage(self) -> str:
        return f"line-{self.num_lineages}"

    # Generators.

    def ask(self, name: str, count: int) -> LeasesGranted:
        generator, oldest_after_step = self.generators[name], self.settings.oldest_after_step(self.learner.version)
        blocked = self.is_blocked
        num_queued = self.ledger["queued"]
        granted = generator_requests.lease(self.state, name, generator.active, count, self.now)
        assert len(granted.leases) <= count
        assert granted.leases or granted.reason
        for lease in granted.leases:
            assert generator.active[1] >= lease.min_version
            assert lease.kind == "eval" or not blocked
            # Whoever waits for leases before a step waits for those that there are, not for ever new ones.
            assert lease.kind == "eval" or num_queued < 2 or generator.active[1] >= oldest_after_step
            generator.leases[lease.lease_id] = lease
            generator.asked[lease.lease_id] = generator.active[1]
        if any(lease.kind == "train" for lease in granted.leases):
            limit = self.settings.group_limit(
                version=self.learner.version, active_version=generator.active[1], steps_left=self.learner.steps_left,
            )  # fmt: skip
            assert self.ledger["taken"] + self.ledger["in_flight"] + self.ledger["queued"] <= limit
        self.settle()
        return granted

    def activate(self, name: str, version: int | None = None) -> None:
        """A version that was told, or what is announced."""
        announced = self.learner.announcement
        if announced is not None:
            self.generators[name].active = (announced.lineage, announced.version if version is None else version)

    def give(self, name: str, lease_id: str, what: Return = "good", ages: Ages = "old", tokens: int = 2) -> Verdict:
        """Return a lease's group; the verdict is the one that the records foretell."""
        generator = self.generators[name]
        lease, asked = generator.leases.pop(lease_id), generator.asked.pop(lease_id)
        lineage, active = generator.active
        newest = max(asked, active) if lineage == lease.lineage else asked
        versions = {"old": (asked, asked), "mixed": (asked, newest), "new": (newest, newest)}[ages]
        if what in ("edge", "ancient"):
            versions = (max(0, self.settings.oldest_trainable(self.learner.version)) if what == "edge" else 0,) * 2
        elif what == "future":
            versions = (asked, self.learner.version + 1)
        accuracy = {"right": lease.group_size, "wrong": 0}.get(what, 1)
        facts = GroupSummary(
            lease_id=lease_id,
            kind=lease.kind,
            position=lease.prompt.position,
            generator_id=name,
            lineage=lease.lineage,
            num_rollouts=lease.group_size + (what == "unfit"),
            num_tokens=tokens,
            oldest_version=versions[0],
            newest_version=versions[1],
            reward=accuracy,
            accuracy=accuracy,
            num_failed=lease.group_size if what == "failed" else 0,
            unfit="every rollout failed" if what == "failed" else "",
            temperature=lease.sampling.temperature,
            has_sampling_mask=False,
        )
        size = {"full": WORST_CASE, "huge": WORST_CASE * 3 // 2}.get(what, 100)
        self.sent[lease_id] = facts, lease_id.encode().ljust(size, b".")
        expected = self.foretold(facts)
        verdict = self.put(lease_id)
        assert verdict == expected or (what == "huge" and verdict == "refused" and expected in ("queued", "filtered"))
        if verdict == "filtered":
            self.books.filtered.add(facts.position)
        self.settle()
        return verdict

    def put(self, lease_id: str) -> Verdict:
        """Send a group, maybe once more."""
        facts, payload = self.sent[lease_id]
        return generator_requests.receive(self.state, facts.generator_id, facts, payload, self.now)[0]

    def give_again(self, lease_id: str) -> None:
        depth = self.state.stats().depth
        assert self.put(lease_id) in ("duplicate", "unknown_lease", "old_lineage")
        assert self.put(lease_id) in ("duplicate", "unknown_lease")
        assert self.state.stats().depth == depth
        self.settle()

    def fail(
        self, name: str, lease_id: str, cause: Literal["prompt_too_long", "engine_error"], *, is_transient: bool = True
    ) -> None:
        generator = self.generators[name]
        lease = generator.leases.pop(lease_id)
        del generator.asked[lease_id]
        num_too_long = self.state.prompts_too_long
        if (
            generator_requests.fail(self.state, name, lease_id, Failure(cause, cause, "", is_transient), self.now)
            == "refused"
        ):
            assert lease_id in self.entries["lease"]
            # The first generator that says so is not believed if another one samples.
            if self.state.prompts_too_long > num_too_long:
                self.books.too_long.add(lease.prompt.position)
        self.settle()

    def heartbeat(self, name: str, *, grows: bool = False) -> None:
        """Leases that the generator believes to have and the queue doesn't are told, and forgotten."""
        generator = self.generators[name]
        progress = {lease_id: int(self.now * 10) if grows else 0 for lease_id in generator.leases}
        void = generator_requests.heartbeat(self.state, name, progress, GeneratorStats(), self.now)
        self.settle()
        assert generator.leases.keys() - self.entries["lease"].keys() <= set(void)
        assert not self.entries["lease"].keys() & set(void)
        for lease_id in void:
            generator.leases.pop(lease_id, None)
            generator.asked.pop(lease_id, None)

    def die(self, name: str) -> None:
        """A generator forgets everything, weights included."""
        self.generators[name] = Generator(("none", -1))

    def leave(self, name: str) -> None:
        generator_requests.goodbye(self.state, name, self.now)
        self.die(name)
        self.settle()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.state.expire(self.now)
        deadline = self.state.next_deadline
        assert deadline is None or deadline > self.now, "the server would wake up for nothing"
        self.settle()

    # The learner.

    def announce(self) -> None:
        builders.announce(self.state, self.learner.version, self.lineage)
        self.settle()

    def take(self) -> tuple[Taken[Payload], ...] | NotReady:
        learner, settings = self.learner, self.settings
        answer = learner_requests.take(self.state, self.lineage, learner.step, learner.version, self.now)
        if isinstance(answer, NotReady):
            assert answer.reason
            assert self.taken is None
            self.settle()
            return answer
        lease_ids = [bytes(item.group).rstrip(b".").decode() for item in answer]
        for item, lease_id in zip(answer, lease_ids, strict=True):
            facts, payload = self.sent[lease_id]
            assert item.group == payload
            assert item.prompt.position == facts.position
            bound = facts.newest_version if settings.queue.on_stale == "mask" else facts.oldest_version
            last_trained_at = learner.version + settings.updates_per_batch - 1
            assert last_trained_at - bound <= settings.queue.max_staleness
            self.staleness.append(last_trained_at - bound)
        assert self.taken in (None, lease_ids)
        is_first, self.taken = self.taken is None, lease_ids
        self.settle()
        if is_first and settings.queue.on_stale != "mask":
            doomed = settings.oldest_after_step(learner.version)
            assert all(version >= doomed for version in self.lease_versions)
        return answer

    def expect_batch(self) -> tuple[Taken[Payload], ...]:
        answer = self.take()
        assert not isinstance(answer, NotReady), answer.reason
        return answer

    def expect_no_batch(self) -> str:
        """Return why there is no batch."""
        answer = self.take()
        assert isinstance(answer, NotReady)
        return answer.reason

    def ack(self, updates: int, *, snapshot: bool = False) -> None:
        """Train on what was taken: so many optimizer steps, 0 if they were skipped."""
        learner, taken = self.learner, self.taken
        assert taken is not None
        facts = [self.sent[lease_id][0] for lease_id in taken]
        num_tokens = sum(f.num_tokens for f in facts)
        if updates:
            num_rollouts = sum(f.num_rollouts for f in facts)  # one is masked
            done = TrainedCounts(True, num_rollouts - 1, {"truncated": 1}, num_tokens - 1, {"truncated": 1})
        else:
            done = TrainedCounts(False, 0)
        step, version = learner.step, learner.version + updates
        payload = learner_requests.ack(
            self.state, StepAck(self.lineage, step, version, done, snapshot=snapshot), self.now
        ).snapshot
        self.acked, self.taken = (step, version, done, payload), None
        ended = self.books.trained if updates else self.books.skipped
        ended.update(f.position for f in facts)
        self.settle()
        if self.settings.queue.on_stale != "mask":
            oldest = self.settings.oldest_trainable(version)
            assert all(v >= oldest for v in self.lease_versions)
        if snapshot:
            self._note_checkpoint(payload)

    def ack_again(self) -> None:
        """The answer to the last ack was lost."""
        if self.acked is not None:
            step, version, done, payload = self.acked
            ack = StepAck(self.lineage, step, version, done, snapshot=True)
            assert learner_requests.ack(self.state, ack, self.now).snapshot == payload
            self.settle()

    def snapshot(self) -> None:
        """A checkpoint between two steps."""
        payload = learner_requests.snapshot(self.state, self.lineage, self.now)
        self.settle()
        self._note_checkpoint(payload)

    def commit_checkpoint(self) -> None:
        """The newest checkpoint is whole: nobody goes back behind it."""
        if self.written:
            self.checkpoint = self.written[-1]
            self.written.clear()
            learner_requests.checkpoint_committed(self.state, self.lineage, self.checkpoint.step)
            self.settle()
            assert len(self.entries["snapshot"]) == 1

    def evaluate(self, *, exclusive: bool) -> None:
        self.num_evals += 1
        learner_requests.evaluate(
            self.state, "test", self.num_evals, EVAL_ROWS, 2, SAMPLING, self.learner.version, exclusive
        )
        self.settle()

    def collect_evaluations(self) -> None:
        """What is finished is handed over until the learner says that it has it."""
        results = learner_requests.eval_results(self.state, self.lineage)
        for result in results:
            assert [prompt.row for prompt, _ in result.groups] == [0, 1]
            for _, payload in result.groups:
                assert payload is None or payload == self.sent[bytes(payload).rstrip(b".").decode()][1]
        received = [(result.dataset, result.step) for result in results]
        learner_requests.eval_results(self.state, self.lineage, received)
        assert learner_requests.eval_results(self.state, self.lineage, received) == []
        self.settle()

    def restart_learner(self, checkpoint: Checkpoint | None, *, lost_queue: bool = False) -> None:
        """The learner dies, and another goes on from a checkpoint or from none; maybe the queue lost everything."""
        old = self.lineage
        self.old_lineages = [old] if lost_queue else [*self.old_lineages, old]
        self.num_lineages += 1
        if lost_queue:
            self.start_server()
            checkpoint = None if checkpoint is None else replace(checkpoint, held=frozenset())
        self.books = Books() if checkpoint is None else checkpoint.books.copy()
        self.checkpoint, self.taken, self.acked = checkpoint, None, None
        self.written.clear()
        self.num_evals = 0
        step, version = (0, 0) if checkpoint is None else (checkpoint.step, checkpoint.version)
        snapshot = None if checkpoint is None else checkpoint.snapshot
        learner_requests.attach(self.state, self.lineage, old, version, step, self.knobs.num_steps, snapshot, self.now)
        self.settle()
        assert self.held_ids == (frozenset() if checkpoint is None else checkpoint.held)
        self.announce()

    def wake_old_learner(self) -> None:
        """A learner that everyone thought dead is refused, and changes nothing."""
        for old in self.old_lineages[-2:]:
            stale_ack = StepAck(old, 0, 1, TrainedCounts(True, 4), snapshot=True)
            calls: tuple[Callable[..., object], ...] = (
                partial(learner_requests.take, self.state, old, 0, 0, self.now),
                partial(learner_requests.ack, self.state, stale_ack, self.now),
                partial(builders.announce, self.state, 0, old),
                partial(learner_requests.checkpoint_committed, self.state, old, 1),
                partial(learner_requests.snapshot, self.state, old, self.now),
                partial(learner_requests.eval_results, self.state, old),
                partial(learner_requests.finish, self.state, old, self.now),
                partial(learner_requests.attach, self.state, old, "", 0, 0, 9, None, self.now),
            )
            for call in calls:
                with pytest.raises(LineageError):
                    call()
        self.settle()

    # The queue server.

    def restart_server(self, clock: float = 0.0) -> None:
        """As ``reload``; nobody else takes notice, and what is asked again gets the same answer."""
        self.reload(clock)
        self.ack_again()
        if self.taken is not None:
            self.take()

    # The end.

    def run_to_the_end(self) -> NotReady:
        """From here on everyone does what they are told and returns everything: it must come to an end."""
        for _ in range(2000):
            before = self.state.revision
            if self.learner.announced_version != self.learner.version:
                self.announce()
            told = [self._serve(name) for name in GENERATORS]
            self.collect_evaluations()
            answer = self.take()
            if not isinstance(answer, NotReady):
                self.ack(self.settings.updates_per_batch)
            elif (answer.stop or answer.exhausted) and not self.entries["evaluation"]:
                assert not (answer.exhausted and self.learner.steps_left and self.ledger["queued"]), "none is left out"
                self._finish()
                return answer
            elif self.state.revision == before and not any(told):
                deadline = self.state.next_deadline
                assert deadline is not None, f"everybody waits: {answer.reason}"
                self.pass_time(deadline - self.now)
        raise AssertionError(f"the run does not end: {persistence.status(self.state, self.now)}")

    def _serve(self, name: str) -> bool:
        """One turn of a generator; whether it was told to activate a version."""
        self.heartbeat(name)
        for lease_id in list(self.generators[name].leases):
            self.give(name, lease_id, ages="mixed")
        granted = self.ask(name, 3)
        if granted.activate is not None:
            self.activate(name, granted.activate)
        return granted.activate is not None

    def _finish(self) -> None:
        learner_requests.finish(self.state, self.lineage, self.now)
        self.settle()
        assert self.ledger["in_flight"] == self.ledger["queued"] == self.ledger["taken"] == 0
        assert not self.entries["lease"]
        assert not self.held_ids
        assert self.ask("g0", 3).leases == ()
        self.restart_server()
        assert self.state.finished

    def _note_checkpoint(self, payload: bytes | None) -> None:
        assert payload is not None
        learner = self.learner
        made = Checkpoint(self.lineage, learner.step, learner.version, payload, self.books.copy(), self.held_ids)
        self.written = [c for c in self.written if c.step != made.step] + [made]
