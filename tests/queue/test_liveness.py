"""No state in which learner and generators wait for each other; the ones that once were, or nearly so, by hand."""

import pytest

from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.messages import DOCTOR, GeneratorStats, NotReady
from tests.queue.witness import Knobs
from tests.queue.world import World

pytestmark = pytest.mark.usefixtures("fixed_admission")

MODES = ("drop", "wait", "mask")


def train(world: World, updates: int, **options) -> None:
    """One step, fed by a generator that does what it is told."""
    while world.taken is None:
        granted = world.ask("g0", 4)
        if granted.activate is not None:
            world.activate("g0", granted.activate)
        for lease_id in list(world.generators["g0"].leases):
            world.give("g0", lease_id)
        assert granted.leases or granted.activate is not None, granted.reason
        world.take()
    world.ack(updates, **options)
    world.announce()


@pytest.mark.parametrize("on_stale", MODES)
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_more_skipped_steps_in_a_row_than_the_bound_starve_nobody(on_stale, bound):
    world = World(Knobs(on_stale=on_stale, max_staleness=bound, num_steps=30))
    train(world, 1)
    for _ in range(bound + 2):
        train(world, 0)
    assert (world.learner.step, world.learner.version) == (bound + 3, 1)
    train(world, 1)
    world.run_to_the_end()
    # 2 groups a step: 30 steps, of which `bound + 2` were skipped.
    assert world.ledger["dropped"]["step_skipped"] == 2 * (bound + 2)
    assert world.ledger["trained"] == 2 * (30 - bound - 2)


@pytest.mark.parametrize("on_stale", MODES)
def test_a_queue_full_of_pinned_and_reserved_bytes_goes_on(on_stale):
    # Room for exactly one step of the worst case. Pinned payloads do not count: they are on the disk already.
    world = World(Knobs(on_stale=on_stale, max_staleness=3, max_groups=2.0, num_steps=12))
    for _ in range(4):
        assert len(world.ask("g0", 4).leases) == 2
        assert "queue.max_bytes" in world.ask("g1", 4).reason
        for lease_id in list(world.generators["g0"].leases):
            world.give("g0", lease_id, "full")
        assert "queue.max_bytes" in world.ask("g1", 4).reason
        world.snapshot()
        world.take()
        world.ack(1)
        world.announce()
        world.activate("g0")
        world.activate("g1")
    assert len(world.payloads) == 8
    # Both are reserved by a generator that dies.
    assert len(world.ask("g1", 4).leases) == 2
    world.die("g1")
    world.run_to_the_end()
    assert world.ledger["trained"] == 24


def test_a_group_that_would_leave_no_room_for_the_rest_of_its_step_is_refused():
    # Room for 2 worst cases, 2 groups a step: one payload of 1.5 would leave room for no other lease, for ever.
    world = World(Knobs(max_groups=2.0, max_attempts=2))
    world.ask("g0", 1)
    (lease_id,) = world.generators["g0"].leases
    assert world.give("g0", lease_id, "huge") == "refused"
    world.run_to_the_end()


def make_world_that_waits() -> tuple[World, str]:
    """Bound 1. Position 3 was leased at version 0, can be trained at 1 and not at 2; all else for version 1 is here."""
    world = World(Knobs(on_stale="wait", max_staleness=1))
    world.ask("g0", 4)
    *quick, slow = world.generators["g0"].leases
    for lease_id in quick:
        world.give("g0", lease_id)
    world.take()
    world.ack(1)
    world.announce()
    world.activate("g1")
    world.ask("g1", 2)
    for lease_id in list(world.generators["g1"].leases):
        world.give("g1", lease_id)
    answer = world.take()
    assert isinstance(answer, NotReady)
    assert answer.reason == "1 groups that this step would make stale, 0 s so far (queue.wait_s)"
    return world, slow


def test_a_step_waits_for_what_it_would_make_stale_no_longer_than_it_may():
    world, slow = make_world_that_waits()
    world.pass_time(6.9)
    assert isinstance(world.take(), NotReady)
    # queue.wait_s is 7 here.
    world.pass_time(0.2)
    assert [item.prompt.position for item in world.expect_batch()] == [2, 4]
    assert world.ledger["dropped"]["cancelled"] == 1
    world.heartbeat("g0")
    assert slow not in world.generators["g0"].leases
    world.run_to_the_end()


def test_a_step_goes_on_as_soon_as_what_it_waits_for_is_here_or_can_not_come():
    world, slow = make_world_that_waits()
    world.give("g0", slow)
    assert [item.prompt.position for item in world.expect_batch()] == [2, 3]
    world, slow = make_world_that_waits()
    world.fail("g0", slow, "prompt_too_long")
    assert [item.prompt.position for item in world.expect_batch()] == [2, 4]


@pytest.mark.parametrize("on_stale", MODES)
def test_an_epoch_is_trained_exactly_once_through_every_kind_of_death(on_stale):
    world = World(Knobs(on_stale=on_stale, max_staleness=2, epochs=1, num_rows=12, num_steps=99, is_filtered=False))
    for round_ in range(3):
        train(world, 1, snapshot=True)
        world.commit_checkpoint()
        world.ask("g1", 2)
        world.restart_server(clock=float(round_))
        train(world, 1)
        world.restart_learner(world.checkpoint, lost_queue=round_ == 1)
        world.wake_old_learner()
        world.die("g1")
    answer = world.run_to_the_end()
    assert answer.exhausted
    assert world.books.trained == set(range(12))
    assert world.ledger["trained"] == 12


def test_the_end_of_the_run_ends_all_leases_those_of_evaluations_too():
    world = World(Knobs())
    world.evaluate(exclusive=False)
    assert [lease.kind for lease in world.ask("g0", 4).leases] == ["eval", "eval", "train", "train"]
    learner_requests.finish(world.state, world.lineage, world.now)
    world.settle()
    assert not world.entries["lease"]
    world.restart_server()
    world.heartbeat("g0")
    assert world.generators["g0"].leases == {}


def report(world: World, name: str, trouble: str) -> None:
    generator_requests.heartbeat(world.state, name, {}, GeneratorStats(), world.now, trouble)


def test_a_learner_that_waits_is_told_why_no_generator_gets_weights():
    world = World(Knobs())
    report(world, "g0", "open port 5556")
    said = "groups (0 of 2 are queued, 0 in flight): generator g0 reports: open port 5556"
    assert world.expect_no_batch() == said
    report(world, "g1", "open port 5557")
    assert "(problems of other generators: 1)" in world.expect_no_batch()
    report(world, "g1", "")
    assert "reports" not in world.expect_no_batch()


def test_a_doctor_is_no_generator():
    world = World(Knobs())
    generator_requests.hello(world.state, "doctor-1", "host", DOCTOR, world.now)
    report(world, "doctor-1", "open port 5556")
    assert world.expect_no_batch() == "groups (0 of 2 are queued, 0 in flight): no generator is connected"
    assert world.state.stats().num_generators == 0
    clients = world.state.generators.alive_clients(world.now)
    assert [entry.generator_id for entry in clients] == ["doctor-1"], "it gets notices"
