"""Generators and a learner in simulated time around the real ``QueueState``: events in a heap, no sleep, no thread.

Time is counted in decode steps: a sequence in a slot gains one token a step, and weights change between two steps. A
generator asks for leases as the worker does (as many as fill its free slots and one in line, under the version that
was active when it asked), and a group is returned when its longest rollout is done. ``simulate`` runs one
``Scenario`` and says what came of it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from async_rl.config.loading import parse_config
from async_rl.config.queue import OnStale
from async_rl.learner.loop.received import drop_bias
from async_rl.queue.core import generator_requests, learner_requests, persistence
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.groups import GroupSummary
from async_rl.queue.core.learner_requests import TakenPayload
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import Announcement, GeneratorStats, LeasesGranted, NotReady, StepAck, TrainedCounts
from async_rl.records import Sampling
from benchmarks.simulated_generator import Sample, SampledGroup, SimulatedGenerator

_LINEAGE = "simulated"
_NUM_ROWS = 1 << 16
_SAMPLING = Sampling(1.0, 1.0, 0, max_new_tokens=1, max_prompt_tokens=1, stop=())
_HEARTBEATS_A_STEP = 10
_STANDSTILL_STEPS = 100
_ACTIVATION_DELAY = 0.02
"""Of a learner's step: from the announcement of a version to its activation."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. Answer lengths are log-normal; ``prompt_share`` of the variance of their logarithm is the prompt's, the
    rest the rollout's own. ``speed`` is what the generators could make over what the learner can train (1: balanced),
    ``wait_steps`` is ``queue.wait_s`` in steps of full speed, ``max_running`` are those of one generator.
    """

    max_staleness: int
    on_stale: OnStale
    speed: float = 1.0
    wait_steps: float = 0.5
    prompt_share: float = 0.0
    num_generators: int = 4
    max_running: int = 16
    groups_per_step: int = 32
    group_size: int = 8
    mean_tokens: float = 500.0
    sigma: float = 1.0
    steps: int = 200
    seed: int = 0

    @property
    def sample_time(self) -> float:
        """Decode steps that all slots together need for the answers of one step, were none lost."""
        return self.groups_per_step * self.group_size * self.mean_tokens / (self.num_generators * self.max_running)

    @property
    def train_time(self) -> float:
        """A learner's step, in decode steps."""
        return self.sample_time * self.speed

    @property
    def warmup_steps(self) -> int:
        return 10 + 2 * self.max_staleness

    def lengths(self, position: int, attempt: int) -> np.ndarray:
        """Tokens of a group's rollouts, int64 [group_size]; the same for every mode of a comparison."""
        of_prompt = np.random.default_rng([self.seed, position]).standard_normal()
        own = np.random.default_rng([self.seed, position, attempt]).standard_normal(self.group_size)
        normal = math.sqrt(self.prompt_share) * of_prompt + math.sqrt(1 - self.prompt_share) * own
        tokens = self.mean_tokens * np.exp(self.sigma * normal - self.sigma**2 / 2)
        return np.maximum(1, np.rint(tokens)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to, over the steps after the warm-up. *Without loss* means the first attempts of its prompts.

    Attributes:
        pace: steps/s over those of the slower side alone.
        wait: share of the time that the learner waited.
        dropped: share of the groups that ended untrained because of their age.
        excluded: share of the prompts that were given up as too slow.
        wasted: share of the sampled tokens that never reached the learner.
        masked: share of the tokens that reached it and were too old.
        tokens: trained tokens of a rollout in a batch, over the same without loss.
        length: mean length of the rollouts with a trained token, over the same without loss.
        long: share of those rollouts that are of the longest tenth without loss.
        bias_length: the learner's metric ``bias/length``.
    """

    pace: float
    wait: float
    dropped: float
    excluded: float
    wasted: float
    masked: float
    staleness_mean: float
    staleness_max: int
    tokens: float
    length: float
    long: float
    bias_length: float


@dataclass(slots=True)
class _Tally:
    """``handed`` are the lengths of rollouts handed over, ``trained`` what is trained of each; tokens by ``ages``."""

    wait: float = 0.0
    cancelled_tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    positions: list[int] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    messages: tuple[Mapping[str, str], ...] = ()
    reward_data: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


class _Simulation:
    """One run: the events in the heap, and what every one of them sets off at the queue."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._step_time = max(scenario.train_time, scenario.sample_time)
        any_config = parse_config(
            {"run": {"dir": "none"}, "model": {"path": "none"}, "data": {"train": "none.jsonl"}}, "simulation"
        )
        settings = replace(
            QueueSettings.from_config(any_config, vocab_size=None),
            group_size=scenario.group_size, groups_per_step=scenario.groups_per_step,
            max_staleness=scenario.max_staleness, sampling=_SAMPLING, max_bytes=1 << 40, filter_range=None,
            on_stale=scenario.on_stale, wait_s=scenario.wait_steps * self._step_time,
            lease_timeout_s=self._step_time, generator_timeout_s=self._step_time,
        )  # fmt: skip
        rows: Sequence[Any] = [_Row()] * _NUM_ROWS
        self._state = QueueState(settings, rows, PromptStream(_NUM_ROWS, seed=0, shuffle=False))
        self._generators = [SimulatedGenerator(f"g{i}", scenario.max_running) for i in range(scenario.num_generators)]
        self._by_name = {g.name: g for g in self._generators}
        self._handed: dict[str, tuple[dict[int, int], ...]] = {}
        self._accuracies = np.random.default_rng([scenario.seed, 1])
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._version = 0
        self._waits_since: float | None = 0.0
        self._alarm_at = math.inf
        self._taken_at = -1
        self._tally = _Tally()
        self._begun_at, self._begun_with = 0.0, self._state.stats().ledger

    def run(self) -> Outcome:
        """Until the last step that counts is trained.

        Raises:
            RuntimeError: learner and generators wait for each other.
        """
        scenario, state = self._scenario, self._state
        last = scenario.warmup_steps + scenario.steps
        # The queue expects more steps, so that no step that counts is one of the last, which run dry.
        learner_requests.attach(state, _LINEAGE, "", 0, 0, last + 4 * (scenario.max_staleness + 2), None, 0.0)
        self._publish(delay=0.0)
        for index, generator in enumerate(self._generators):
            self._at(float(index), lambda g=generator: self._beat(g))
        while self._version < last:
            if self._waits_since is not None and self._now - self._waits_since > _STANDSTILL_STEPS * self._step_time:
                raise RuntimeError(f"the learner waits for ever: {persistence.status(state, self._now)}")
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._settle()
        state.check()
        return self._outcome()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    @property
    def _decode_step(self) -> int:
        """The next decode step to begin."""
        return math.ceil(self._now)

    @property
    def _counts(self) -> bool:
        return self._version >= self._scenario.warmup_steps

    # Generators.

    def _beat(self, generator: SimulatedGenerator) -> None:
        progress = {lease_id: group.num_tokens(self._decode_step) for lease_id, group in generator.groups.items()}
        void = generator_requests.heartbeat(self._state, generator.name, progress, GeneratorStats(), self._now)
        self._cancel(generator, void)
        self._at(self._now + self._step_time / _HEARTBEATS_A_STEP, lambda: self._beat(generator))

    def _activate(self, generator: SimulatedGenerator, version: int) -> None:
        generator.activate(version, self._decode_step)
        generator.submit_fresh()
        self._admit(generator)

    def _accept(self, generator: SimulatedGenerator, granted: LeasesGranted) -> None:
        scenario = self._scenario
        for lease in granted.leases:
            group = SampledGroup(lease)
            lengths = scenario.lengths(lease.prompt.position, lease.attempt)
            group.samples += [Sample(group, int(n)) for n in lengths]
            generator.groups[lease.lease_id] = group
        generator.submit_fresh()
        self._admit(generator)

    def _admit(self, generator: SimulatedGenerator) -> None:
        for sample in generator.admit_waiting(self._decode_step):
            self._at(sample.started_at + sample.num_tokens, lambda s=sample: self._finish(generator, s))

    def _finish(self, generator: SimulatedGenerator, sample: Sample) -> None:
        group = sample.group
        if group.is_void:
            return
        generator.running.discard(sample)
        group.num_done += 1
        if group.num_done == len(group.samples):
            self._return(generator, group)
        self._admit(generator)

    def _return(self, generator: SimulatedGenerator, group: SampledGroup) -> None:
        lease, size = group.lease, len(group.samples)
        del generator.groups[lease.lease_id]
        rollouts = tuple(generator.tokens_by_version(s) for s in group.samples)
        versions, num_tokens = {v for r in rollouts for v in r}, sum(s.num_tokens for s in group.samples)
        accuracy = float(self._accuracies.integers(0, 2, size).sum())
        facts = GroupSummary(
            lease_id=lease.lease_id, kind="train", position=lease.prompt.position, generator_id=generator.name,
            lineage=_LINEAGE, num_rollouts=size, num_tokens=num_tokens, oldest_version=min(versions),
            newest_version=max(versions), reward=accuracy, accuracy=accuracy, num_failed=0, unfit="",
            temperature=lease.sampling.temperature, has_sampling_mask=False,
        )  # fmt: skip
        self._handed[lease.lease_id] = rollouts
        generator_requests.receive(self._state, generator.name, facts, lease.lease_id.encode(), self._now)

    def _cancel(self, generator: SimulatedGenerator, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            lost = generator.cancel(lease_id, self._decode_step)
            if self._counts:
                self._tally.cancelled_tokens += lost
        self._admit(generator)

    # What an event sets off.

    def _settle(self) -> None:
        """As the server after every turn: tell of void leases, and try what waits again if anything changed."""
        state = self._state
        state.expire(self._now)
        while True:
            for name in state.generators.to_notify():
                self._cancel(self._by_name[name], state.generators.pop_cancelled(name))
            for generator in self._generators:
                self._ask(generator)
            if self._waits_since is not None and self._taken_at != state.revision:
                self._taken_at = state.revision
                self._take()
            all_asked = all(g.request is None or g.asked_at == state.revision for g in self._generators)
            if all_asked and not state.generators.to_notify():
                break
        deadline = state.next_deadline
        if deadline is not None and deadline < self._alarm_at:
            self._alarm_at = deadline
            self._at(deadline, self._ring)

    def _ring(self) -> None:
        self._alarm_at = math.inf

    def _ask(self, generator: SimulatedGenerator) -> None:
        request = generator.ask(self._scenario.group_size)
        if request is None or generator.asked_at == self._state.revision:
            return
        version, wanted = request
        granted = generator_requests.lease(self._state, generator.name, (_LINEAGE, version), wanted, self._now)
        generator.asked_at, told = self._state.revision, (version, granted.activate)
        if granted.leases or (granted.activate is not None and generator.told != told):
            generator.request, generator.told, generator.asked_at = None, told, -1
            generator.activate_first = -1 if granted.activate is None else granted.activate
            self._accept(generator, granted)

    # The learner.

    def _take(self) -> None:
        taken = learner_requests.take(self._state, _LINEAGE, self._version, self._version, self._now)
        if isinstance(taken, NotReady):
            return
        assert self._waits_since is not None
        if self._counts:
            self._tally.wait += self._now - self._waits_since
        self._waits_since = None
        self._at(self._now + self._scenario.train_time, lambda: self._trained(taken))

    def _trained(self, taken: Sequence[TakenPayload]) -> None:
        facts = self._facts(taken)
        learner_requests.ack(self._state, StepAck(_LINEAGE, self._version, self._version + 1, facts), self._now)
        self._version += 1
        if self._version == self._scenario.warmup_steps:
            self._begun_at, self._begun_with = self._now, self._state.stats().ledger
        self._publish(delay=_ACTIVATION_DELAY * self._scenario.train_time)
        self._waits_since = self._now

    def _facts(self, taken: Sequence[TakenPayload]) -> TrainedCounts:
        """What the learner trains: under ``mask`` the tokens that are young enough."""
        oldest, rollouts, tokens = self._version - self._scenario.max_staleness, Counter[bool](), Counter[bool]()
        if self._counts:
            self._tally.positions += [payload.prompt.position for payload in taken]
        for payload in taken:
            for by_version in self._handed.pop(bytes(payload.payload).decode()):
                young = {v: n for v, n in by_version.items() if v >= oldest}
                total, trained = sum(by_version.values()), sum(young.values())
                rollouts[trained > 0] += 1
                tokens.update({True: trained, False: total - trained})
                if self._counts:
                    self._tally.handed.append(total)
                    self._tally.trained.append(trained)
                    self._tally.ages.update({self._version - v: n for v, n in young.items()})
        return TrainedCounts(True, rollouts[True], {"stale": rollouts[False]}, tokens[True], {"stale": tokens[False]})

    def _publish(self, delay: float) -> None:
        version = self._version
        learner_requests.announce(self._state, Announcement(_LINEAGE, version, f"digest-{version}", "none"))
        for generator in self._generators:
            self._at(self._now + delay, lambda g=generator: self._activate(g, version))

    def _outcome(self) -> Outcome:
        scenario, tally = self._scenario, self._tally
        before, after = self._begun_with, self._state.stats().ledger

        def ended(unit: str, *causes: str) -> int:
            return sum(after[unit]["dropped"][cause] - before[unit]["dropped"][cause] for cause in causes)

        time, groups = self._now - self._begun_at, scenario.steps * scenario.groups_per_step
        late, too_slow = ended("groups", "stale", "cancelled", "too_slow"), ended("groups", "too_slow")
        handed, trained = np.array(tally.handed), np.array(tally.trained)
        # Without a loss, these steps would have trained the first attempts of the prompts that they span.
        span = range(min(tally.positions), max(tally.positions) + 1)
        sampled = np.concatenate([scenario.lengths(position, 1) for position in span])
        lost = tally.cancelled_tokens + ended("tokens", *after["tokens"]["dropped"])
        return Outcome(
            pace=scenario.steps * self._step_time / time,
            wait=tally.wait / time,
            dropped=late / (late + groups),
            excluded=too_slow / (too_slow + groups),
            wasted=lost / (lost + float(handed.sum())),
            masked=1 - float(trained.sum() / handed.sum()),
            staleness_mean=sum(age * n for age, n in tally.ages.items()) / tally.ages.total(),
            staleness_max=max(tally.ages),
            tokens=float(trained.mean() / sampled.mean()),
            length=float(handed[trained > 0].mean() / sampled.mean()),
            long=float(np.mean(handed[trained > 0] > np.quantile(sampled, 0.9))),
            bias_length=drop_bias(before, after)["bias/length"],
        )


def simulate(scenario: Scenario) -> Outcome:
    """Run ``scenario``; takes a second or so."""
    return _Simulation(scenario).run()
