"""Random histories of a run: whatever happens in whatever order, ``world.World`` finds nothing amiss, and it ends."""

from __future__ import annotations

from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from async_rl.config.data import CurriculumConfig
from async_rl.config.queue import OnStale
from tests.examples import examples
from tests.queue.events import EVENTS, Event
from tests.queue.witness import Knobs
from tests.queue.world import World

SEEDS = st.integers(0, (1 << 24) - 1)
"""Of larger ranges hypothesis draws mostly small numbers, the same again and again."""
CURRICULA = (
    CurriculumConfig(),
    CurriculumConfig(solved_at=1.0, unsolved_at=0.0, rest_epochs=1),
    CurriculumConfig(chance="learnability", min_chance=0.2, solved_at=1.0),
)
ONE_EVENT = st.sampled_from([event for event, weight in EVENTS.items() for _ in range(weight)])


class CoreMachine(RuleBasedStateMachine):
    """Single events and bursts of them; in every history some kinds are more frequent, and some never happen."""

    on_stale: ClassVar[OnStale]

    def __init__(self) -> None:
        super().__init__()
        self.world, self.weights = World(Knobs()), list(EVENTS.values())

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        random = Random(seed)
        updates = random.randint(1, 2)
        self.weights = [weight * random.choice((0, 1, 1, 1, 3)) for weight in EVENTS.values()]
        self.world = World(
            Knobs(
                on_stale=self.on_stale,
                updates=updates,
                max_staleness=random.randint(updates - 1, 3),
                is_filtered=random.random() < 0.5,
                refill=random.random() < 0.5,
                max_groups=random.choice((100.0, 100.0, 4.5, 2.5, 2.0)),
                max_attempts=random.choice((1, 3, 50)),
                epochs=random.choice((None, 1, 2)),
                num_steps=random.randint(3, 20),
                run_ahead=random.choice(("bound", "auto", "auto", 0.0, 1.0)),
                curriculum=random.choice(CURRICULA),
            )
        )
        note(f"{self.world.knobs}")

    @rule(event=ONE_EVENT, seed=SEEDS)
    def happen(self, event: Event, seed: int) -> None:
        event(self.world, Random(seed))

    @rule(seed=SEEDS, num_events=st.integers(5, 30))
    def live_on(self, seed: int, num_events: int) -> None:
        random = Random(seed)
        for event in random.choices(list(EVENTS), self.weights, k=num_events) if any(self.weights) else ():
            note(f"{event.__name__}")
            event(self.world, random)

    def teardown(self) -> None:
        if self.world.is_sound:
            self.world.run_to_the_end()


class DropMachine(CoreMachine):
    on_stale = "drop"


class WaitMachine(CoreMachine):
    on_stale = "wait"


class MaskMachine(CoreMachine):
    on_stale = "mask"


def _case(machine: type[CoreMachine], chosen: settings) -> type:
    case = type(machine.__name__, (machine.TestCase,), {})
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    case.settings = settings(chosen, stateful_step_count=25, suppress_health_check=slow)
    return case


MACHINES = (DropMachine, WaitMachine, MaskMachine)
TestDrop, TestWait, TestMask = (_case(machine, examples(150, num_quick=12)) for machine in MACHINES)

NUM_LONG = 3_400
"""Of each of the three: more than 10,000 together."""
TestManyDrop, TestManyWait, TestManyMask = (
    pytest.mark.long(pytest.mark.timeout(1800)(_case(machine, examples(NUM_LONG, num_quick=NUM_LONG))))
    for machine in MACHINES
)
