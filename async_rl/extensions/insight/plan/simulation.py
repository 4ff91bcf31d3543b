"""A run in simulated time: the real ``QueueState``, with a learner and generators that only wait.

Nothing of the queue is modelled: leases are granted, groups accepted, dropped and taken by ``queue.core``. The events
of generators, of the learner and of transfers lie in one heap. After each event, requests that wait are tried again, as
the queue server does. Groups have no payload.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.data.dataset import Row
from async_rl.extensions.insight.comparison.summary import LATE
from async_rl.extensions.insight.plan.lengths import Lengths
from async_rl.extensions.insight.plan.rates import Rates
from async_rl.extensions.insight.plan.simulated_generator import SimulatedGenerator, SimulatedGroup
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.groups import GroupSummary
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import Announcement, NotReady, StepAck, Taken, TrainedCounts
from async_rl.queue.storage.payloads import Payload
from async_rl.records import Lease

_LINEAGE = "plan"
_NUM_ROWS = 1 << 16
_MOST_DRAWN = 1 << 14
"""Number of groups whose lengths are drawn. Later prompts have the same ones again."""
_NEVER_S = 1e15
_ROLLOUTS, _LEAST_STEPS, _MOST_STEPS = 30_000, 12, 200
"""About how many rollouts are sampled in the steps that count, and the limits of the number of these steps."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What may differ between the runs of a plan."""

    max_staleness: int
    num_generators: int
    num_ranks: int
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run with ``setting`` would come to, in its steady state."""

    setting: Setting
    steps_per_s: float
    idle_learner: float  # share of the time in which the learner waits for groups
    idle_generators: float  # share of the time in which a generator decodes nothing, mean over them
    staleness: Mapping[int, float]  # share of the trained tokens by their staleness, in versions
    dropped: float  # share of the groups that ended which were dropped for their age
    masked: float  # share of the tokens of taken groups that were too old to train on
    weights_bytes_per_s: float  # of weights that all generators receive; 0 if a version's size is unknown

    @property
    def staleness_mean(self) -> float:
        return sum(age * share for age, share in self.staleness.items())


def simulate(config: Config, rates: Rates, setting: Setting, *, num_steps: int | None = None) -> Prediction:
    """Return the prediction for a run of ``config`` with ``setting``.

    ``num_steps`` are the steps that count, after those in which the queue fills. None: as many as give steady means.

    Raises:
        ConfigError: the config can't have this bound.
    """
    return Simulation(config, rates, setting, num_steps).run()


class Simulation:
    """One run: the events in the heap, and what each of them causes at the queue."""

    def __init__(self, config: Config, rates: Rates, setting: Setting, num_steps: int | None) -> None:
        self._rates, self._setting, self._sync_every = rates, setting, config.weights.sync_every
        self._most_groups = config.generator.max_concurrent_groups
        self._repeats = config.sampling.deterministic or config.generator.backend == "fake"
        # The sizes of sampling masks are unknown here. Progress is never missing, and nothing stops the run.
        sampling = config.sampling.model_copy(update={"top_p": 1.0, "top_k": 0, "min_p": 0.0})
        queue = config.queue.model_copy(update={"max_staleness": setting.max_staleness, "lease_timeout_s": _NEVER_S})
        planned = config.model_copy(update={"queue": queue, "sampling": sampling})
        self._settings = replace(
            QueueSettings.from_config(planned, vocab_size=None), generator_timeout_s=_NEVER_S, max_filtered=1 << 60
        )
        size = self._settings.group_size
        steady = _ROLLOUTS // (size * self._settings.groups_per_step)
        self._num_steps = num_steps or min(_MOST_STEPS, max(_LEAST_STEPS, steady))
        self._warmup_steps = self._num_steps // 2 + min(_MOST_STEPS, 2 * (setting.max_staleness + 1))
        self._lengths = setting.lengths.draw(_MOST_DRAWN, size, config.run.seed).tolist()
        self._is_filtered = (np.random.default_rng(config.run.seed).random(_MOST_DRAWN) < rates.filtered).tolist()
        stream = PromptStream(_NUM_ROWS, seed=0, shuffle=False)
        self._state = QueueState(self._settings, [Row((), {})] * _NUM_ROWS, stream)
        names = [f"g{number}" for number in range(setting.num_generators)]
        slots, decode_s = config.generator.batch_size, rates.decode_s
        self._generators = {name: SimulatedGenerator(name, slots, decode_s) for name in names}
        self._asking: dict[int, deque[SimulatedGenerator]] = {}  # by the version with which they ask
        self._returned: dict[str, list[dict[int, int]]] = {}  # tokens by version of each rollout, by lease
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._now = self._wait_s = self._free_at = self._wait_ends_at = 0.0
        self._step = self._version = self._num_received = 0
        # Revisions of the queue at which the take and the requests for leases were tried last.
        self._published = self._tried_at = self._granted_at = -1
        self._wakes_at = math.inf
        self._awaits_batch = True
        self._ages: Counter[int] = Counter()

    def run(self) -> Prediction:
        """Simulate until the last step that counts is trained."""
        # The queue expects more steps, so that no step that counts is one of the last, which run dry.
        last, more = self._warmup_steps + self._num_steps, 4 * (self._setting.max_staleness + 2)
        learner_requests.attach(self._state, _LINEAGE, "", 0, 0, last + more, None, 0.0)
        self._publish()
        begun = self._read()
        while self._step < last:
            is_warm = self._step >= self._warmup_steps
            self._now, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)
            self._settle()
            if not is_warm and self._step >= self._warmup_steps:
                begun = self._read()
                self._ages.clear()
        self._state.check()
        return self._prediction(self._read() - begun)

    def _at(self, time: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen, arguments))

    # Generators.

    def _offer(self, generator: SimulatedGenerator) -> None:
        """Begin the transfer of the newest version, unless an older one is still on its way."""
        if not generator.is_receiving and self._published > generator.version:
            generator.is_receiving = True
            self._at(self._now + self._rates.transfer_s, self._activate, generator, self._published)

    def _activate(self, generator: SimulatedGenerator, version: int) -> None:
        generator.is_receiving = False
        generator.activate(version, self._now, self._rates.pause_s)
        self._num_received += 1
        self._offer(generator)
        self._go_on(generator)

    def _finish(self, generator: SimulatedGenerator, alarm_at: float) -> None:
        if generator.alarm_at == alarm_at:
            generator.alarm_at = math.inf
            for group in generator.finish(self._now):
                self._return(generator, group)
            self._go_on(generator)

    def _go_on(self, generator: SimulatedGenerator) -> None:
        """Schedule the end of the generator's next rollout, and let it request leases."""
        if (end := generator.next_end) != generator.alarm_at:
            generator.alarm_at = end
            if end < math.inf:
                self._at(end, self._finish, generator, end)
        if not generator.is_asking and generator.version >= generator.activate_first and self._wanted(generator) > 0:
            generator.is_asking, self._granted_at = True, -1
            self._asking.setdefault(generator.version, deque()).append(generator)

    def _wanted(self, generator: SimulatedGenerator) -> int:
        wanted = generator.num_wanted(self._settings.group_size)
        return wanted if self._most_groups is None else min(wanted, self._most_groups - len(generator.groups))

    def _return(self, generator: SimulatedGenerator, group: SimulatedGroup) -> None:
        lease, size = group.lease, len(group.lengths)
        rollouts = generator.tokens_by_version(group)
        versions = {version for rollout in rollouts for version in rollout}
        is_useful = not self._is_filtered[self._drawn(lease)]
        summary = GroupSummary(
            lease_id=lease.lease_id, kind="train", position=lease.prompt.position, generator_id=generator.name,
            lineage=_LINEAGE, num_rollouts=size, num_tokens=sum(group.lengths), oldest_version=min(versions),
            newest_version=max(versions), reward=0.0, accuracy=0.0, num_failed=0, unfit="", has_sampling_mask=False,
            temperature=lease.sampling.temperature, rewards_differ=is_useful, rewards_vary=is_useful,
        )  # fmt: skip
        payload = lease.lease_id.encode()
        verdict, _ = generator_requests.receive(self._state, generator.name, summary, payload, self._now)
        if verdict == "queued":
            self._returned[lease.lease_id] = rollouts

    def _drawn(self, lease: Lease) -> int:
        """Return the number of the drawn group that this lease is. Another attempt is another one, unless the engine
        samples the same answers again.
        """
        attempt = 1 if self._repeats else lease.attempt
        return (lease.prompt.position + 4099 * (attempt - 1)) % _MOST_DRAWN

    # What an event causes at the queue.

    def _settle(self) -> None:
        """Send notices of cancelled leases, and try the requests that wait, until nothing changes any more."""
        state = self._state
        while True:
            for name in [entry.generator_id for entry in state.generators.to_notify()]:
                self._generators[name].cancel(state.generators.pop_cancelled(name), self._now)
                self._go_on(self._generators[name])
            self._grant()
            if self._awaits_batch and self._tried_at != state.revision:
                self._tried_at = state.revision
                self._take()
            elif not state.generators.to_notify():
                break
        deadline = state.next_deadline
        if deadline is not None and self._now < deadline < self._wakes_at:
            self._wakes_at = deadline
            self._at(deadline, self._expire)

    def _expire(self) -> None:
        self._wakes_at = math.inf
        self._state.expire(self._now)

    def _grant(self) -> None:
        """Try the requests for leases. What the queue refuses one generator, it refuses all with the same version,
        unless that one was too slow."""
        if self._granted_at == self._state.revision:
            return
        for version in list(self._asking):
            line, refused = self._asking[version], list[SimulatedGenerator]()
            while line:
                generator, active = line[0], (_LINEAGE, version)
                wanted = self._wanted(generator)
                granted = generator_requests.lease(self._state, generator.name, active, wanted, self._now)
                if not granted.leases and granted.activate is None:
                    if generator_requests.may_have_leases(self._state, generator.name):
                        break
                    refused.append(line.popleft())
                    continue
                line.popleft()
                generator.is_asking, generator.activate_first = False, granted.activate or 0
                for lease in granted.leases:
                    generator.accept(lease, self._lengths[self._drawn(lease)], self._now)
                self._go_on(generator)
            line.extend(refused)
            if not line:
                del self._asking[version]
        self._granted_at = self._state.revision

    # The learner.

    def _take(self) -> None:
        state = self._state
        if learner_requests.lacks_groups(state, _LINEAGE, self._step):
            return
        taken = learner_requests.take(state, _LINEAGE, self._step, self._version, self._now)
        if isinstance(taken, NotReady):
            if state.waits_since is not None and self._wait_ends_at <= self._now:
                self._wait_ends_at = state.waits_since + self._settings.queue.wait_s
                self._at(self._wait_ends_at, self._end_wait)
            return
        self._awaits_batch = False
        # The queue answers the take while the learner still publishes the step before.
        begun_at = max(self._now, self._free_at)
        self._wait_s += begun_at - self._free_at
        counts, num_tokens = self._train(taken)
        self._at(begun_at + self._rates.step_s(num_tokens, self._setting.num_ranks), self._acknowledge, counts)

    def _end_wait(self) -> None:
        self._state.expire(self._now)
        self._tried_at = -1

    def _train(self, groups: Sequence[Taken[Payload]]) -> tuple[TrainedCounts, int]:
        """Return what is trained of a batch, and all its tokens. The groups are spread over the step's updates."""
        oldest = self._settings.oldest_trainable(self._version)
        rollouts, tokens = Counter[bool](), Counter[bool]()
        for number, taken in enumerate(groups):
            at_version = self._version + number * self._settings.updates_per_batch // len(groups)
            for by_version in self._returned.pop(bytes(taken.group).decode()):
                rollouts[max(by_version) >= oldest] += 1
                for version, count in by_version.items():
                    tokens[version >= oldest] += count
                    if version >= oldest:
                        self._ages[at_version - version] += count
        masked = [{"stale": counts[False]} for counts in (rollouts, tokens)]
        return TrainedCounts(True, rollouts[True], masked[0], tokens[True], masked[1]), tokens.total()

    def _acknowledge(self, counts: TrainedCounts) -> None:
        version = self._version + self._settings.updates_per_batch
        learner_requests.ack(self._state, StepAck(_LINEAGE, self._step, version, counts), self._now)
        self._step, self._version, self._awaits_batch = self._step + 1, version, True
        self._free_at = self._now + self._rates.after_s
        if version - self._published >= self._sync_every:
            self._at(self._free_at, self._publish)

    def _publish(self) -> None:
        self._published = self._version
        learner_requests.announce(self._state, Announcement(_LINEAGE, self._version, f"digest-{self._version}", "none"))
        for generator in self._generators.values():
            self._offer(generator)

    # The result.

    def _read(self) -> np.ndarray:
        """Return totals until now: seconds of the run, of the learner's waits, and in which generators ran; received
        versions; groups that were too late, and others; masked and trained tokens.
        """
        groups, tokens = self._state.ledger.groups, self._state.ledger.tokens
        busy_s = sum(generator.busy_s for generator in self._generators.values())
        late, kept = sum(groups.dropped[cause] for cause in LATE), groups.done + groups.filtered
        masked = tokens.masked.total()
        return np.array([self._now, self._wait_s, busy_s, self._num_received, late, kept, masked, tokens.done])

    def _prediction(self, totals: np.ndarray) -> Prediction:
        """Return the prediction from what ``_read`` counted in the steps that count."""
        time_s, wait_s, busy_s, num_received, late, kept, masked, trained = totals.tolist()
        return Prediction(
            setting=self._setting,
            steps_per_s=self._num_steps / time_s,
            idle_learner=min(1.0, wait_s / time_s),
            idle_generators=max(0.0, 1 - busy_s / (time_s * len(self._generators))),
            staleness={age: count / max(1, self._ages.total()) for age, count in sorted(self._ages.items())},
            dropped=late / max(1, late + kept),
            masked=masked / max(1, masked + trained),
            weights_bytes_per_s=num_received * self._rates.version_bytes / time_s,
        )
