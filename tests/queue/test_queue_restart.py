"""A queue server that dies alone: the next one goes on from what was written down. See ``test_core_machine`` too."""

import pytest

from async_rl.errors import QueueError
from async_rl.queue.core import learner_requests, persistence
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState, encode_state
from async_rl.queue.messages import NotReady, StepAck
from tests.queue.builders import SAMPLING, rows, settings
from tests.queue.witness import Knobs
from tests.queue.world import World

pytestmark = pytest.mark.usefixtures("fixed_admission")


def make_world(**changes) -> World:
    """Bound 1. Positions 0 and 1 taken, 2 queued, 3 in flight at g0."""
    world = World(Knobs(**changes))
    world.ask("g0", 4)
    for lease_id in list(world.generators["g0"].leases)[:3]:
        world.give("g0", lease_id)
    world.take()
    return world


def test_what_was_taken_is_taken_again_and_a_lease_is_still_good():
    world = make_world()
    (lease_id,) = world.generators["g0"].leases
    world.restart_server()
    assert [item.prompt.position for item in world.expect_batch()] == [0, 1]
    assert world.give("g0", lease_id) == "queued"
    assert world.put(lease_id) == "duplicate"


def test_a_return_from_before_the_restart_is_still_a_duplicate():
    world = make_world()
    world.restart_server()
    assert [world.put(lease_id) for lease_id in world.sent] == ["duplicate"] * 3


def test_an_ack_repeated_to_the_next_server_gives_the_same_snapshot():
    world = make_world()
    world.ack(1, snapshot=True)
    assert world.acked is not None
    step, version, done, snapshot = world.acked
    world.restart_server()
    assert (
        learner_requests.ack(world.state, StepAck(world.lineage, step, version, done, snapshot=True), 0.0).snapshot
        == snapshot
    )


def test_every_lease_may_grow_anew():
    # The lease timeout is 10 s; nothing was heard of the lease for 9 when the server died.
    world = make_world()
    world.pass_time(9.0)
    world.restart_server(clock=500.0)
    world.pass_time(9.0)
    assert world.ledger["in_flight"] == 1
    world.pass_time(1.0)
    assert world.ledger["dropped"]["expired"] == 1


def test_no_time_passes_while_no_server_runs_however_often_it_dies():
    # Queued 2 s under the first server, 3 s under the second, 4 s under the third.
    world = make_world()
    world.ack(1)
    world.announce()
    for clock, seconds in ((0.0, 2.0), (1000.0, 3.0), (50.0, 4.0)):
        if clock:
            world.restart_server(clock)
        world.pass_time(seconds)
    world.activate("g1")
    world.ask("g1", 1)
    for lease_id in list(world.generators["g1"].leases):
        world.give("g1", lease_id)
    taken = world.expect_batch()
    assert {item.prompt.position: item.queued_s for item in taken}[2] == pytest.approx(9.0)


def test_an_evaluation_goes_on_with_the_rows_that_are_missing():
    world = World(Knobs())
    world.evaluate(exclusive=True)
    world.ask("g0", 1)
    (lease_id,) = world.generators["g0"].leases
    assert world.give("g0", lease_id) == "eval_done"
    world.restart_server()
    assert [(lease.kind, lease.prompt.row) for lease in world.ask("g0", 3).leases] == [("eval", 1)]
    world.restart_server()
    assert world.ask("g1", 3).leases == ()
    (lease_id,) = world.generators["g0"].leases
    world.give("g0", lease_id)
    world.collect_evaluations()
    assert learner_requests.eval_results(world.state, world.lineage) == []
    world.restart_server()
    learner_requests.evaluate(world.state, "test", 1, rows(2), 2, SAMPLING, 0, True)
    assert [lease.kind for lease in world.ask("g1", 1).leases] == ["train"]


def test_a_finished_run_stays_finished():
    world = make_world(num_steps=1)
    world.ack(1)
    world.run_to_the_end()
    world.restart_server()
    assert world.state.finished
    assert isinstance(world.take(), NotReady)


def load_into(digest: str, world: World, **changes) -> QueueState:
    state = QueueState(settings(**changes), rows(12), PromptStream(12, seed=0), data_digest=digest)
    persistence.load(state, world.entries, encode_state(world.state), {}, {}, 0.0)
    return state


def test_records_of_other_training_rows_are_refused_unless_asked_for():
    world = make_world()
    with pytest.raises(QueueError, match="expected rows with digest"):
        load_into("other", world)
    assert load_into("other", world, accepts_changed_data=True).stats().depth == 1


def test_records_that_are_not_understood_are_refused_by_name():
    world = make_world()
    next(iter(world.entries["group"].values()))["group"].pop("ref")
    with pytest.raises(QueueError, match=r"another version of async-rl: ValidationError: .*`ref`.*journal_dir"):
        load_into("", world)
