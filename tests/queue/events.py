"""What can happen in a run, one function an event; the arguments come from a seeded generator of random numbers.

``test_core_machine`` draws them. Who can't do what an event says (return a lease that it has not) does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal

from tests.queue.world import GENERATORS, Ages, Return, World

Event = Callable[[World, Random], None]

_AGES: tuple[Ages, ...] = ("old", "old", "mixed", "new")
_GOOD: Return = "good"
_RETURNS: tuple[Return, ...] = (
    _GOOD, _GOOD, _GOOD, _GOOD, _GOOD, "edge", "edge", "edge", "right", "wrong", "failed", "unfit", "ancient", "future",
    "full", "full", "huge", "huge",
)  # fmt: skip


def ask(world: World, random: Random) -> None:
    """Mostly with what is announced."""
    name = random.choice(GENERATORS)
    if random.random() < 0.8:
        world.activate(name)
    world.ask(name, random.randint(1, 4))


def give(world: World, random: Random) -> None:
    name = random.choice(GENERATORS)
    if leases := list(world.generators[name].leases):
        world.give(name, random.choice(leases), random.choice(_RETURNS), random.choice(_AGES), random.randint(2, 5))


def give_everything(world: World, random: Random) -> None:
    name = random.choice(GENERATORS)
    for lease_id in list(world.generators[name].leases):
        world.give(name, lease_id, ages=random.choice(_AGES))


def give_again(world: World, random: Random) -> None:
    if world.sent:
        world.give_again(random.choice(list(world.sent)[-8:]))


def fail(world: World, random: Random) -> None:
    name = random.choice(GENERATORS)
    causes: tuple[Literal["prompt_too_long", "engine_error"], ...] = ("prompt_too_long", "engine_error")
    if leases := list(world.generators[name].leases):
        world.fail(name, random.choice(leases), random.choice(causes))


def fail_everything(world: World, random: Random) -> None:
    """A tool is away: some generators fail all that they get for a while, so that they are quarantined."""
    is_transient, broken = random.random() < 0.7, random.sample(GENERATORS, random.randint(1, 3))
    for _ in range(random.randint(1, 10)):
        for name in broken:
            world.activate(name)
            world.ask(name, 4)
            for lease_id in list(world.generators[name].leases):
                world.fail(name, lease_id, "engine_error", is_transient=is_transient)
        if random.random() < 0.3:
            world.pass_time(random.choice((1.0, 8.0, 70.0, 400.0)))


def heartbeat(world: World, random: Random) -> None:
    world.heartbeat(random.choice(GENERATORS), grows=random.random() < 0.7)


def go_away(world: World, random: Random) -> None:
    leave = random.choice((world.leave, world.die))
    leave(random.choice(GENERATORS))


def pass_time(world: World, random: Random) -> None:
    world.pass_time(random.choice((0.5, 1.0, 4.0, 8.0, 12.0)))


def take(world: World, random: Random) -> None:
    world.take()


def ack(world: World, random: Random) -> None:
    """Every fourth step is skipped, every other has a checkpoint; some are not published."""
    if world.taken is None:
        world.take()
    if world.taken is not None:
        updates = random.choice((0, 1, world.knobs.updates, world.knobs.updates))
        world.ack(updates, snapshot=random.random() < 0.5)
        if random.random() < 0.7:
            world.announce()


def train_on(world: World, random: Random) -> None:
    """Steps fed by one quick generator, beside which the groups of the others age; or all of them skipped."""
    updates = random.choice((0, world.knobs.updates, world.knobs.updates))
    for _ in range(random.randint(1, world.knobs.max_staleness + 2)):
        world.announce()
        world.activate("g2")
        world.ask("g2", 4)
        for lease_id in list(world.generators["g2"].leases):
            world.give("g2", lease_id)
        world.take()
        if world.taken is not None:
            world.ack(updates)


def announce(world: World, random: Random) -> None:
    world.announce()


def evaluate(world: World, random: Random) -> None:
    if world.num_evals < 4:
        world.evaluate(exclusive=random.random() < 0.5)


def collect_evaluations(world: World, random: Random) -> None:
    world.collect_evaluations()


def snapshot(world: World, random: Random) -> None:
    world.snapshot()


def commit_checkpoint(world: World, random: Random) -> None:
    world.commit_checkpoint()


def restart_learner(world: World, random: Random) -> None:
    """From the committed checkpoint, from one that was written and not yet committed, or from none."""
    checkpoint = world.checkpoint
    if world.written and (checkpoint is None or random.random() < 0.4):
        checkpoint = world.written[-1]
    if random.random() < (0.1 if checkpoint is not None else 0.15):
        world.restart_learner(None, lost_queue=random.random() < 0.2)
    elif checkpoint is not None:
        world.restart_learner(checkpoint, lost_queue=random.random() < 0.2)


def wake_old_learner(world: World, random: Random) -> None:
    world.wake_old_learner()


def restart_server(world: World, random: Random) -> None:
    world.restart_server(random.choice((0.0, world.now, world.now + 1000.0)))


EVENTS: dict[Event, int] = {
    ask: 12, give: 14, give_everything: 6, give_again: 2, fail: 2, fail_everything: 2, heartbeat: 4, go_away: 2,
    pass_time: 4, take: 6, ack: 8, train_on: 2, announce: 2, evaluate: 1, collect_evaluations: 1,
    snapshot: 1, commit_checkpoint: 2, restart_learner: 2, wake_old_learner: 1, restart_server: 2,
}  # fmt: skip
"""How often each is drawn."""
