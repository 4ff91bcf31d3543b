"""Any order of events: the ledger adds up, nothing too old is taken, nothing is trained twice, nothing hangs."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.codec import decode_group
from async_rl.queue.messages import GeneratorStats, LeasesGranted, NotReady, TrainedFacts
from async_rl.records import Lease
from tests.queue import builders
from tests.queue.builders import SAMPLING, group, make_buffer, put, rows

NUM_ROWS = 12
GENERATORS: tuple[str, ...] = ("g0", "g1", "g2")


class BufferMachine(RuleBasedStateMachine):
    """One learner (at a time) and three generators, each with the leases it believes to hold and its version."""

    @initialize(
        staleness=st.integers(0, 3), updates=st.integers(1, 2), refill=st.booleans(), num_steps=st.integers(3, 20)
    )
    def start(self, staleness: int, updates: int, refill: bool, num_steps: int) -> None:
        self.eta, self.updates = max(staleness, updates - 1), updates
        self.num_steps = num_steps
        self.buffer = make_buffer(
            num_rows=NUM_ROWS, num_steps=num_steps, max_staleness=self.eta, updates_per_batch=updates, refill=refill,
            max_attempts=4, max_filtered=10_000, lease_timeout_s=10.0,
        )  # fmt: skip
        self.now = 0.0
        self.lineage, self.num_lineages = builders.LINEAGE, 0
        self.active: dict[str, tuple[str, int]] = dict.fromkeys(GENERATORS, (self.lineage, 0))
        self.held: dict[str, dict[str, Lease]] = {g: {} for g in GENERATORS}
        self.returned: list = []
        self.taken: list[int] | None = None
        self.trained: Counter[int] = Counter()
        self.saved: tuple[bytes, int, int, Counter[int]] | None = None
        self.eval_step = 0

    @property
    def learner(self):
        assert self.buffer.learner is not None
        return self.buffer.learner

    # Generators.

    @rule(generator=st.sampled_from(GENERATORS), count=st.integers(1, 4), fresh=st.booleans())
    def ask_leases(self, generator: str, count: int, fresh: bool) -> None:
        if fresh:
            self.activate(generator)
        granted = self.buffer.lease(generator, self.active[generator], count, self.now)
        assert len(granted.leases) <= count
        assert granted.leases or granted.reason
        for lease in granted.leases:
            assert self.active[generator][1] >= lease.min_version
            self.held[generator][lease.lease_id] = lease

    @rule(generator=st.sampled_from(GENERATORS))
    def activate(self, generator: str) -> None:
        announced = self.learner.announcement
        if announced is not None:
            self.active[generator] = (announced.lineage, announced.version)

    @rule(generator=st.sampled_from(GENERATORS), good=st.sampled_from((0, 1, 1, 2)), data=st.data())
    def return_group(self, generator: str, good: int, data: st.DataObject) -> None:
        if not self.held[generator]:
            return
        lease = self.held[generator].pop(data.draw(st.sampled_from(sorted(self.held[generator]))))
        # Sampled between the version the lease was asked with and the active one.
        lineage, newest = self.active[generator]
        version = data.draw(st.integers(min(lease.min_version, newest), newest)) if lineage == lease.lineage else 0
        accuracies = [1.0] * good + [0.0] * (lease.group_size - good)
        returned = group(lease, version, accuracies=accuracies[: lease.group_size], generator=generator)
        put(self.buffer, returned, now=self.now)
        self.returned.append(returned)

    @rule(data=st.data())
    def return_twice(self, data: st.DataObject) -> None:
        if not self.returned:
            return
        before = self.buffer.stats()
        verdict = put(self.buffer, data.draw(st.sampled_from(self.returned)), now=self.now)
        assert verdict in ("duplicate", "unknown_lease", "old_lineage")
        assert self.buffer.stats().depth == before.depth

    @rule(
        generator=st.sampled_from(GENERATORS),
        cause=st.sampled_from(("prompt_too_long", "engine_error")),
        data=st.data(),
    )
    def give_back(self, generator: str, cause, data: st.DataObject) -> None:
        if not self.held[generator]:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.held[generator])))
        del self.held[generator][lease_id]
        self.buffer.fail(generator, lease_id, cause, self.now)

    @rule(generator=st.sampled_from(GENERATORS), grows=st.booleans())
    def heartbeat(self, generator: str, grows: bool) -> None:
        progress = {lease_id: int(self.now * 10) if grows else 0 for lease_id in self.held[generator]}
        for lease_id in self.buffer.heartbeat(generator, progress, GeneratorStats(), self.now):
            self.held[generator].pop(lease_id, None)

    @rule(generator=st.sampled_from(GENERATORS))
    def die(self, generator: str) -> None:
        self.held[generator].clear()

    @rule(generator=st.sampled_from(GENERATORS))
    def leave(self, generator: str) -> None:
        self.buffer.goodbye(generator, self.now)
        self.held[generator].clear()

    @rule(seconds=st.floats(0.1, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.buffer.expire(self.now)

    # The learner.

    @rule()
    def take(self) -> None:
        learner = self.learner
        answer = self.buffer.take(self.lineage, learner.step, learner.version, 2, self.now)
        if isinstance(answer, NotReady):
            assert answer.reason
            assert self.taken is None
            return
        last = learner.version + self.updates - 1
        for item in answer:
            assert last - decode_group(item.body).oldest_version <= self.eta
        taken = [item.prompt.position for item in answer]
        assert self.taken in (None, taken)
        self.taken = taken

    @precondition(lambda self: self.taken is not None)
    @rule(steps=st.integers(0, 2), snapshot=st.booleans(), publish=st.booleans())
    def ack(self, steps: int, snapshot: bool, publish: bool) -> None:
        learner, taken = self.learner, self.taken
        assert taken is not None
        steps = min(steps, self.updates)
        # 2 groups of 2 rollouts of 3 tokens.
        facts = TrainedFacts(True, 3, {"truncated": 1}, 9, {"truncated": 3}) if steps else TrainedFacts(False, 0)
        step, version = learner.step, learner.version + steps
        acked = self.buffer.ack(self.lineage, step, version, facts, snapshot=snapshot, now=self.now)
        assert self.buffer.ack(self.lineage, step, version, facts, snapshot=snapshot, now=self.now) is acked
        self.taken = None
        if steps:
            self.trained.update(taken)
            assert max(self.trained.values()) == 1
        if snapshot:
            assert acked.snapshot is not None
            self.saved = (acked.snapshot, step + 1, version, self.trained.copy())
        if publish or self.updates > 1:
            builders.announce(self.buffer, version, self.lineage)

    @rule(steps=st.integers(1, 3), snapshot=st.booleans())
    def train_on(self, steps: int, snapshot: bool) -> None:
        """Steps of a fast generator, beside which the groups of the others age."""
        for _ in range(steps):
            if not self.learner.steps_left:
                return
            builders.announce(self.buffer, self.learner.version, self.lineage)
            self._sample_everything()
            self.take()
            if self.taken is not None:
                self.ack(1, snapshot=snapshot, publish=True)

    @rule()
    def announce_newest(self) -> None:
        builders.announce(self.buffer, self.learner.version, self.lineage)

    @rule(exclusive=st.booleans())
    def evaluate(self, exclusive: bool) -> None:
        if self.eval_step == 3:
            return
        self.eval_step += 1
        self.buffer.evaluate("test", self.eval_step, rows(2), 2, SAMPLING, self.learner.version, exclusive)

    @rule()
    def collect_evaluations(self) -> None:
        results = self.buffer.eval_results(self.lineage)
        self.buffer.eval_results(self.lineage, [(r.dataset, r.step) for r in results])

    @rule(from_start=st.sampled_from((False, False, False, True)))
    def restart_learner(self, from_start: bool) -> None:
        """The learner dies and another goes on from the last checkpoint, or from none."""
        old, self.num_lineages = self.lineage, self.num_lineages + 1
        self.lineage, self.taken = f"line-{self.num_lineages}", None
        snapshot, step, version, trained = self.saved or (None, 0, 0, Counter())
        if from_start:
            self.saved, snapshot, step, version, trained = None, None, 0, 0, Counter()
        self.buffer.attach(self.lineage, old, version, step, self.num_steps, snapshot, self.now)
        self.trained = Counter(trained)
        builders.announce(self.buffer, version, self.lineage)

    # Always.

    @invariant()
    def the_ledger_adds_up(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.check()

    def teardown(self) -> None:
        """From wherever it is, a healthy generator and a healthy learner bring the run to its end."""
        if not hasattr(self, "buffer"):
            return
        builders.announce(self.buffer, self.learner.version, self.lineage)
        for _ in range(400):
            learner = self.learner
            if not learner.steps_left or self.buffer.status(self.now)["stop"]:
                break
            self._sample_everything()
            self.take()
            if self.taken is None:
                self.now += 11.0  # leases that died with their generators
                self.buffer.expire(self.now)
            else:
                self.ack(1 if self.updates == 1 else 2, snapshot=False, publish=True)
        else:
            raise AssertionError(f"the run hangs: {self.buffer.status(self.now)}")
        self.buffer.finish(self.lineage, self.now)
        self.buffer.check()
        ledger = self.buffer.stats().ledger["groups"]
        assert ledger["in_flight"] == ledger["queued"] == ledger["taken"] == 0

    def _sample_everything(self) -> None:
        active = (self.lineage, self.learner.version)
        while (granted := self.buffer.lease("healthy", active, 3, self.now)).leases:
            assert isinstance(granted, LeasesGranted)
            for lease in granted.leases:
                accuracies = [1.0] + [0.0] * (lease.group_size - 1)
                put(self.buffer, group(lease, active[1], accuracies=accuracies, generator="healthy"), now=self.now)


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
