"""The queue's core, event by event. By default: 2 groups a step, 2 rollouts a group, 3 tokens a rollout, bound 1."""

import re

import pytest
from msgspec.structs import replace

from async_rl.errors import DamagedPayloadError, LineageError, QueueError
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.messages import Decoded, GeneratorStats, NotReady, StepAck, TrainedCounts
from async_rl.queue.storage.payloads import MemoryPayloads, Payload, PayloadRef
from tests.queue.builders import (
    LINEAGE,
    SAMPLING,
    ack,
    announce,
    dropped,
    fail,
    fill_and_take,
    group,
    groups_of,
    leases,
    make_state,
    positions,
    put,
    rows,
    take,
    with_failed,
)

pytestmark = pytest.mark.usefixtures("fixed_admission")


# Delivery.


def test_seeds_depend_on_the_place_and_the_run_alone():
    a, b = make_state(), make_state()
    first = {lease.prompt.position: lease.seed for lease in leases(a, 4, generator="x")}
    second = {lease.prompt.position: lease.seed for lease in leases(b, 4, generator="y")}
    assert first == second
    assert len(set(first.values())) == 4
    assert all(0 <= seed < 2**63 for seed in first.values())


def test_groups_are_taken_in_stream_order_whatever_their_arrival():
    state = make_state()
    held = leases(state, 4)
    for index in (3, 1, 2, 0):
        put(state, group(held[index]))
    assert positions(take(state)) == [0, 1]


def test_groups_leased_with_an_older_version_go_first():
    state = make_state(max_staleness=2)
    quick, _, (slow,) = leases(state, 2), leases(state, 1, generator="g1"), leases(state, 1)
    for lease in quick:
        put(state, group(lease))
    take(state)
    ack(state)
    # Position 2 comes again, and is asked for with version 1; position 3 was asked for with version 0.
    generator_requests.goodbye(state, "g1", 0.0)
    (again,) = leases(state, 1, version=1)
    for lease, version in ((again, 1), (slow, 0)):
        put(state, group(lease, version))
    assert positions(take(state)) == [3, 2]


def test_a_take_of_another_step_or_version_is_refused_and_one_that_overtakes_an_ack_waits():
    state = make_state()
    for step, version in ((1, 0), (0, 1)):
        with pytest.raises(QueueError, match="expected a take of step 0 at version 0"):
            learner_requests.take(state, LINEAGE, step, version, 0.0)
    fill_and_take(state)
    early = learner_requests.take(state, LINEAGE, 1, 1, 0.0)
    assert isinstance(early, NotReady)
    assert early.reason == "the ack of step 0"


def test_facts_that_do_not_add_up_are_refused_and_change_nothing():
    state = make_state()
    fill_and_take(state)
    # 2 groups of 2 rollouts of 3 tokens: 4 rollouts, 12 tokens.
    with pytest.raises(QueueError, match="12 that were taken"):
        learner_requests.ack(state, StepAck(LINEAGE, 0, 1, TrainedCounts(True, 4, {}, 11, {})), 0.0)
    assert groups_of(state)["taken"] == 2


def test_masked_and_failed_rollouts_are_counted_by_cause():
    state = make_state()
    fill_and_take(state)
    facts = TrainedCounts(True, 1, {"truncated": 2, "failed": 1}, 3, {"truncated": 6, "failed": 3})
    ack(state, facts)
    ledger = state.stats().ledger
    assert ledger["rollouts"]["trained"] == 1
    assert ledger["rollouts"]["masked"] == {"truncated": 2}
    assert ledger["rollouts"]["failed"] == 1
    assert ledger["tokens"]["masked"] == {"truncated": 6, "failed": 3}
    state.check()


def test_a_group_that_does_not_fit_its_lease_is_refused_and_sampled_again():
    state = make_state()
    first, second, third = leases(state, 3)
    assert put(state, group(first, accuracies=(1.0, 0.0, 1.0))) == "refused"
    assert put(state, group(second, version=1)) == "refused"  # the learner is at 0
    assert put(state, group(third, finish_reason="error")) == "refused"
    assert dropped(state) == {"refused": 2, "failed": 1}
    # What failed or was refused comes after new prompts, until a group is good.
    again = leases(state, 3)
    assert [lease.prompt.position for lease in again] == [3, 4, 5]
    assert put(state, group(again[0])) == "queued"
    assert [lease.prompt.position for lease in leases(state, 1)] == [0]


# Consumption.


def test_a_group_that_aged_above_the_bound_in_the_queue_is_dropped():
    # At version 1, position 4 comes back sampled by 0, though its lease wanted 1: young enough now, too old at 2.
    state = make_state()
    fill_and_take(state)
    ack(state)
    held = leases(state, 3, version=1)
    for lease, version in zip(held, (1, 1, 0), strict=True):
        assert put(state, group(lease, version)) == "queued"
    assert positions(take(state)) == [2, 3]
    ack(state)
    assert dropped(state) == {"stale": 1}
    again = leases(state, 1, version=2)
    assert (again[0].prompt.position, again[0].attempt) == (4, 2)


# Filter.


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((1.0, 1.0), "filtered"), ((0.0, 0.0), "filtered"), ((1.0, 0.0), "queued"),
        # Outside 0..1 they are rewards: only equal ones are filtered.
        ((-1.0, -1.0), "filtered"), ((5.0, 5.0), "filtered"), ((-1.0, 1.0), "queued"), ((5.0, 7.0), "queued"),
        ((-1.0, 0.0), "queued"),
    ],
)  # fmt: skip
def test_groups_without_signal_are_filtered(accuracies, verdict):
    state = make_state()
    (lease,) = leases(state, 1)
    assert put(state, group(lease, accuracies=accuracies)) == verdict


def test_the_filter_is_strict_at_its_edges_and_leaves_failed_rollouts_out():
    state = make_state(filter_range=(0.5, 0.9))
    first, second = leases(state, 2)
    assert put(state, group(first, accuracies=(1.0, 0.0))) == "filtered"  # 0.5 is not above 0.5
    # Of the two, one failed and the other is at 0.8: the mean is 0.8, and not 0.4.
    assert put(state, with_failed(group(second, accuracies=(0.8, 0.0)), 1)) == "queued"


def test_without_refill_a_filtered_group_is_kept_and_masked():
    state = make_state(refill=False)
    first, second = leases(state, 2)
    put(state, group(first, accuracies=(1.0, 1.0)))
    put(state, group(second))
    taken = take(state)
    assert not isinstance(taken, NotReady)
    assert [item.masked for item in taken] == [True, False]


@pytest.mark.parametrize("refill", [True, False])
def test_what_a_filter_of_the_users_own_does_not_keep_is_filtered_and_counted(refill: bool):
    state = make_state(refill=refill, filter_range=None, max_filtered=1)
    good, bad = leases(state, 2)
    assert put(state, replace(group(bad), kept=False)) == ("filtered" if refill else "queued")
    assert (state.ledger.groups.filtered, len(state.queued)) == ((1, 0) if refill else (0, 1))
    put(state, group(good))
    state.check()
    taken = take(state)
    if refill:
        assert isinstance(taken, NotReady)
        assert "allows: 1 by queue.filter_function, 0 had a mean accuracy" in taken.stop
    else:
        assert not isinstance(taken, NotReady)
        assert [item.masked for item in taken] == [False, True]


@pytest.mark.parametrize(
    ("accuracies", "diagnosis"), [((1.0, 1.0), ": 2 had .* at or above"), ((0.0, 0.0), ": 0 had a mean")]
)
def test_too_many_filtered_groups_without_a_step_stop_the_run(accuracies, diagnosis):
    state = make_state(max_filtered=3)
    for each in (accuracies, accuracies, (0.0, 0.0)):
        assert not isinstance(answer := take(state), NotReady) or not answer.stop
        put(state, group(leases(state, 1)[0], accuracies=each))
    answer = take(state)
    assert isinstance(answer, NotReady)
    assert answer.stop.startswith("3 groups were filtered since the last step")
    assert re.search(diagnosis, answer.stop), answer.stop
    assert leases(state, 1) == []


# Failures.


def test_a_lease_lives_only_while_its_progress_grows():
    state = make_state()
    alive, stuck = leases(state, 2)
    stats, progress = GeneratorStats(), {alive.lease_id: 1, stuck.lease_id: 0}
    generator_requests.heartbeat(state, "g0", progress, stats, 6.0)
    assert state.next_deadline == 10.0
    assert generator_requests.heartbeat(state, "g0", progress, stats, 10.0) == (stuck.lease_id,)
    assert dropped(state) == {"expired": 1}
    assert state.expire(15.9) == 0
    assert state.expire(16.0) == 1  # the same progress as at 6


def test_what_generators_report_is_summed_over_those_that_are_alive():
    # Decoding by the number of sequences: of one and of two.
    state = make_state()
    few = GeneratorStats(decoded=(Decoded(1.0, 1.0, 10),), counters={"judge_requests": 3})
    many = GeneratorStats(decoded=(Decoded(2.0, 2.0, 5),) * 2, counters={"judge_requests": 4, "judge_failed": 1})
    generator_requests.heartbeat(state, "g0", {}, few, 1.0)
    generator_requests.heartbeat(state, "g1", {}, many, 1.0)
    total = state.generators.total(1.0)
    assert total.decoded == (Decoded(3.0, 3.0, 15), Decoded(2.0, 2.0, 5))
    assert total.counters == {"judge_requests": 7, "judge_failed": 1}


def test_an_epoch_of_refused_prompts_stops_the_run():
    state = make_state(num_rows=3)
    for _ in range(3):
        (lease,) = leases(state, 1)
        assert isinstance(answer := take(state), NotReady)
        assert not answer.stop
        fail(state, lease, "prompt_too_long")
    assert isinstance(answer := take(state), NotReady)
    assert "every prompt of epoch 0 was excluded (3 were longer than sampling.max_prompt_tokens = 8" in answer.stop


def test_a_generator_that_leaves_gives_its_leases_back_unblamed():
    state = make_state(max_attempts=1)
    leases(state, 2)
    generator_requests.goodbye(state, "g0", 1.0)
    assert dropped(state) == {"cancelled": 2}
    assert [lease.attempt for lease in leases(state, 2, generator="g1")] == [1, 1]


def test_who_takes_a_dead_generators_place_has_its_leases_given_out_again_at_once():
    # What killed it may have been the prompt, so an attempt is counted.
    state = make_state(max_attempts=2)
    (good, held, _), (other,) = leases(state, 3), leases(state, 1, generator="g1")
    put(state, group(good))
    generator_requests.hello(state, "g0-1", "h", "fake", 1.0, replaces="g0")
    assert dropped(state) == {"expired": 2}
    assert put(state, group(other, generator="g1")) == "queued"
    assert [(lease.prompt.position, lease.attempt) for lease in leases(state, 2, generator="g0-1")] == [(1, 2), (2, 2)]
    assert put(state, group(held)) == "unknown_lease"
    generator_requests.hello(state, "g0-1", "h", "fake", 2.0, replaces="g0")
    assert dropped(state) == {"expired": 2}, "it may say so again"


# The ends.


class Damageable(MemoryPayloads):
    """A store whose payloads in ``damaged`` can't be read."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: set[PayloadRef] = set()

    def read(self, ref: PayloadRef) -> Payload:
        if ref in self.damaged:
            raise DamagedPayloadError("its checksum differs", "000001.seg")
        return super().read(ref)


def test_a_damaged_group_of_the_rest_is_sampled_again_before_the_last_step():
    state, payloads = make_state(num_rows=3, epochs=1), Damageable()
    state.payloads = payloads
    for lease in leases(state, 9):
        put(state, group(lease))
    assert positions(take(state)) == [0, 1]
    ack(state)
    (rest,) = state.queued
    payloads.damaged.add(rest.ref)
    assert isinstance(answer := take(state), NotReady)
    assert not answer.exhausted
    (again,) = leases(state, 9, version=1)
    put(state, group(again, 1))
    assert positions(take(state)) == [2]


# Evaluation.


def ask_evaluation(state, *, step: int = 0, exclusive: bool = True, min_version: int = 0, num_rows: int = 2) -> None:
    learner_requests.evaluate(state, "test", step, rows(num_rows), 1, SAMPLING, min_version, exclusive)


def test_an_evaluation_goes_first_and_holds_training_up_only_if_it_is_exclusive():
    state = make_state()
    for _ in range(2):  # asked for twice, it is one
        ask_evaluation(state)
    held = leases(state, 9)
    assert [(lease.kind, lease.prompt.row, lease.group_size) for lease in held] == [("eval", 0, 1), ("eval", 1, 1)]
    assert leases(state, 9, generator="g1") == []
    for lease in held:
        assert put(state, group(lease, accuracies=(1.0,))) == "eval_done"
    ask_evaluation(state, step=1, exclusive=False)
    assert [lease.kind for lease in leases(state, 4)] == ["eval", "eval", "train", "train"]
    assert (state.stats().ledger["eval"]["groups"]["queued"], groups_of(state)["issued"]) == (2, 2)


def test_an_evaluation_waits_for_its_version():
    state = make_state()
    fill_and_take(state)
    learner_requests.ack(state, StepAck(LINEAGE, 0, 1, TrainedCounts(True, 4, {}, 12, {})), 0.0)
    ask_evaluation(state, step=1, min_version=1)
    assert (
        generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0).activate is None
    )  # version 1 is not announced yet
    announce(state, 1)
    assert generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0).activate == 1
    assert [lease.min_version for lease in leases(state, 1, version=1)] == [1]


def test_an_evaluation_of_a_version_to_come_lets_training_go_on_with_the_next_one():
    # As under learner.fixed_lag: version 2 is trained, 1 is announced, and the evaluation waits for 2. The bound has
    # room for version 1 alone: (1 + 1 - (2 - 1)) * 2 = 2 groups.
    state = make_state()
    fill_and_take(state)
    ack(state)
    fill_and_take(state, 1)
    ack(state, announced=False)
    learner_requests.evaluate(state, "test", 2, rows(1), 1, SAMPLING, 2, False)
    granted = generator_requests.lease(state, "g0", (LINEAGE, 0), 4, 0.0)
    assert (granted.leases, granted.activate) == ((), 1)
    assert len(leases(state, 4, 1)) == 2


def test_a_queue_that_lost_what_the_learner_waits_for_says_so():
    state = make_state()
    ask_evaluation(state)
    learner_requests.confirm(state, LINEAGE, 0, [("test", 0)])
    with pytest.raises(QueueError, match=r"expected version 1 as the newest.*got version 0; .*start the run again"):
        learner_requests.confirm(state, LINEAGE, 1)
    with pytest.raises(QueueError, match=r"does not know the evaluation of test at step 4; .*start the run again"):
        learner_requests.confirm(state, LINEAGE, 0, [("test", 0), ("test", 4)])
    with pytest.raises(LineageError):
        learner_requests.confirm(state, "line-b", 0)


def test_after_the_last_step_only_evaluations_are_given():
    state = make_state(num_steps=1)
    fill_and_take(state)
    ack(state)
    ask_evaluation(state, step=1, min_version=1, num_rows=1)
    assert [lease.kind for lease in leases(state, 9, version=1)] == ["eval"]


# Lineages and snapshots.


def test_a_server_without_a_learner_says_that_it_lost_the_state():
    state = make_state(attached=False)
    with pytest.raises(QueueError, match="start the learner again from its checkpoint"):
        learner_requests.take(state, LINEAGE, 0, 0, 0.0)


def test_the_same_learner_attaching_again_changes_nothing():
    state = make_state()
    leases(state, 2)
    learner_requests.attach(state, LINEAGE, "", 0, 0, 100, None, 1.0)
    assert groups_of(state)["in_flight"] == 2


def test_a_damaged_or_foreign_snapshot_is_refused():
    state = make_state()
    fill_and_take(state)
    snapshot = ack(state, snapshot=True)
    assert snapshot is not None
    damaged = snapshot[:-1] + bytes([snapshot[-1] ^ 1])
    with pytest.raises(QueueError, match="checksum"):
        learner_requests.attach(state, "line-b", LINEAGE, 1, 1, 100, damaged, 1.0)
    with pytest.raises(QueueError, match="expected a snapshot"):
        learner_requests.attach(state, "line-b", LINEAGE, 2, 2, 100, snapshot, 1.0)
    learner = state.learner
    assert learner is not None
    assert learner.lineage == LINEAGE
