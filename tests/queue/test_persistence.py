"""Nothing that outlives a queue server is forgotten by the journal, or by the snapshot in a checkpoint."""

from collections import Counter
from dataclasses import fields
from typing import Any, get_args

import msgspec
import pytest

from async_rl.errors import QueueError
from async_rl.queue.core import generator_requests, learner_requests, persistence
from async_rl.queue.core.admission import LearnerSide
from async_rl.queue.core.failures import Attempts, FailedPlace
from async_rl.queue.core.learning_signal import Beginning, SignalWatch, Streak
from async_rl.queue.core.ledger import Account, Ledger, Outcomes, Sums
from async_rl.queue.core.persistence import KEPT_AT_RESTORE, KNOWN_AT_RESTORE
from async_rl.queue.core.prompts import PromptStream, StreamCursor
from async_rl.queue.core.state import PersistedState, QueueState, encode_state, persisted
from async_rl.queue.messages import Announcement
from async_rl.queue.storage.journal import Kind
from tests.queue.builders import LINEAGE, make_state, rows, settings
from tests.queue.witness import Knobs
from tests.queue.world import World

pytestmark = pytest.mark.usefixtures("fixed_admission")

DATA_DIGEST = "rows-1"


def full_account(first: int) -> Account:
    return Account(*range(first, first + 7), masked=Counter(stale=first), dropped=Counter(expired=first))


def full_state() -> PersistedState:
    """Every field, also of the records inside, is another than its default."""
    sums = [Sums(n, n + 1, n + 2, n + 0.5, n + 0.25) for n in range(1, 6)]
    streak = Streak(3, Counter(wrong=1), 2, Counter(context=1), "end", "wrong")
    return PersistedState(
        now=12.5,
        data_digest=DATA_DIGEST,
        learner=LearnerSide(
            "line-b", 3, 9, 4, 2, announcement=Announcement("line-b", 4, "digest", "tcp://a:1", b"probe", (1, 2)),
            taken_ids=(), acked=(2, b"snapshot"), finished=True, digests={4: "digest"},
            training_notes=("step 3: the gradient explodes",),
        ),
        old_lineages={"line-a"},
        cursor=StreamCursor(40, [3, 5], Counter({0: 1}), Counter({1: 2}), "[41]"),
        attempts={7: Attempts(1, 2, 3, 4.5, 5)},
        excluded=Counter({0: 2}),
        last_excluded={8: "poison"},
        filtered_since_step=6,
        filtered_right_since_step=5,
        filtered_own_since_step=6,
        prompts_too_long=4,
        ledger=Ledger("done", full_account(1), full_account(2), full_account(3)),
        eval_ledger=Ledger("read", full_account(4), full_account(5), full_account(6)),
        outcomes=Outcomes(*sums),
        received_evals={("test", 1)},
        num_damaged=2,
        num_good=17,
            num_outcomes=19,
        code="new",
        proven_code="old",
        failed_places={"r.py:3": FailedPlace("reward_error", "KeyError", 2, [1], ["test:1"])},
        signal=SignalWatch(streak, Beginning(4, 1.0, 8, streak), Counter(right=1), 1.0, 2.0, {"x": "y"}),
        quarantines={"g0": "generator 'g0' was quarantined"},
    )  # fmt: skip


def new_state() -> QueueState:
    state = make_state(attached=False)
    state.data_digest = DATA_DIGEST
    return state


def check_no_empty_field(record: msgspec.Struct) -> None:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        # What was taken is queued in a snapshot, so the example has nothing taken.
        assert value or name == "taken_ids", f"{type(record).__name__}.{name} is empty: give it a value in full_state"
        if isinstance(value, msgspec.Struct):
            check_no_empty_field(value)


def test_the_example_sets_every_field():
    full, empty = full_state(), PersistedState()
    for field in fields(PersistedState):
        value = getattr(full, field.name)
        assert value != getattr(empty, field.name), f"{field.name} has its default: give it another in full_state"
        if isinstance(value, msgspec.Struct):
            check_no_empty_field(value)


def test_every_field_comes_back_from_the_journal():
    before, after = new_state(), new_state()
    before.adopt(full_state())
    no_entries: dict[Kind, dict[str, Any]] = {kind: {} for kind in get_args(Kind)}
    persistence.load(after, no_entries, encode_state(before), {}, {}, now=0.0)
    assert persisted(after) == full_state()
    assert after.stream.cursor is after.cursor
    assert after.clock_ahead_s == 12.5


def test_every_field_comes_back_from_a_snapshot_but_those_that_are_kept():
    before, after = new_state(), new_state()
    saved = full_state()
    for ledger in (saved.ledger, saved.eval_ledger):
        # Leases end with a restore, and evaluations come again: nothing here may be in flight, taken or undelivered.
        for account in (ledger.groups, ledger.rollouts, ledger.tokens):
            account.in_flight = account.taken = account.queued = 0
    before.adopt(saved)
    assert before.learner is not None
    data = persistence.snapshot(before, before.learner)
    persistence.restore(after, persistence.read_snapshot(after, data, step=3, version=4))
    for field in fields(PersistedState):
        came_back = getattr(after, field.name) == getattr(saved, field.name)
        assert came_back == (field.name not in KEPT_AT_RESTORE or field.name == "data_digest"), field.name


def test_a_restore_without_a_snapshot_leaves_nothing_but_what_is_kept():
    state = new_state()
    state.adopt(full_state())
    for ledger in (state.ledger, state.eval_ledger):
        ledger.groups, ledger.rollouts, ledger.tokens = Account(), Account(), Account()
    persistence.restore(state, None)
    empty, left = PersistedState(), KEPT_AT_RESTORE | KNOWN_AT_RESTORE
    for field in fields(PersistedState):
        is_empty = getattr(state, field.name) == getattr(empty, field.name)
        assert is_empty == (field.name not in left or field.name == "received_evals"), field.name


def test_a_snapshot_counts_what_is_in_flight_as_not_yet_drawn():
    state = make_state()
    generator_requests.lease(state, "g0", (LINEAGE, 0), 2, 0.0)
    found = persistence.read_snapshot(state, learner_requests.snapshot(state, LINEAGE, 0.0), step=0, version=0)
    assert found.state.cursor == StreamCursor(2, [0, 1])
    assert state.cursor == StreamCursor(2, [])


# A queue server that dies alone: the next one goes on from what was written down. See ``test_core_machine``, too.


def make_world(**changes) -> World:
    """Bound 1. Positions 0 and 1 taken, 2 queued, 3 in flight at g0."""
    world = World(Knobs(**changes))
    world.ask("g0", 4)
    for lease_id in list(world.generators["g0"].leases)[:3]:
        world.give("g0", lease_id)
    world.take()
    return world


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
