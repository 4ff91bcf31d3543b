"""The queue's core, event by event. By default: 2 groups a step, 2 rollouts a group, 3 tokens a rollout, bound 1."""

import re

import msgspec
import pytest

from async_rl.errors import DamagedPayloadError, LineageError, QueueError
from async_rl.net.codec import decode_group
from async_rl.queue.core import generator_requests, learner_requests, persistence
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import Decoded, GeneratorStats, NotReady, StepAck, Taken, TrainedCounts
from async_rl.queue.storage.payloads import MemoryPayloads, Payload, PayloadRef
from async_rl.records import Lease
from tests.queue.builders import (
    LINEAGE,
    SAMPLING,
    SKIPPED,
    ack,
    all_trained,
    announce,
    dropped,
    fail,
    fail_until_excluded,
    fill_and_take,
    group,
    groups_of,
    leases,
    make_state,
    positions,
    put,
    rows,
    settings,
    take,
)

pytestmark = pytest.mark.usefixtures("fixed_admission")


def put_and_take(state: QueueState, held: list[Lease]) -> tuple[Taken[Payload], ...]:
    for lease in held:
        put(state, group(lease))
    taken = take(state)
    assert not isinstance(taken, NotReady)
    return taken


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
    slow = leases(state, 3)
    for lease in slow[:2]:
        put(state, group(lease))
    take(state)
    ack(state)
    # Position 2 comes again after 3: a lease asked with version 0 still goes before one asked with 1.
    fresh = leases(state, 2, version=1)
    for lease in (*fresh, slow[2]):
        put(state, group(lease, 1))
    assert positions(take(state)) == [2, 3]


def test_a_take_repeated_gives_the_same_groups_until_it_is_acked():
    state = make_state()
    held = leases(state, 4)
    for lease in held[:2]:
        put(state, group(lease))
    first = take(state)
    put(state, group(held[2]))
    assert take(state) == first
    assert groups_of(state)["taken"] == 2


def test_an_ack_repeated_changes_nothing():
    state = make_state()
    fill_and_take(state)
    facts = TrainedCounts(True, 4, {}, 12, {})
    first = learner_requests.ack(state, StepAck(LINEAGE, 0, 1, facts, snapshot=True), 0.0)
    before = groups_of(state)
    assert learner_requests.ack(state, StepAck(LINEAGE, 0, 1, facts, snapshot=True), 5.0).snapshot is first.snapshot
    assert groups_of(state) == before
    assert before["trained"] == 2


def test_a_take_that_overtakes_the_ack_before_it_waits():
    state = make_state()
    fill_and_take(state)
    early = learner_requests.take(state, LINEAGE, 1, 1, 0.0)
    assert isinstance(early, NotReady)
    assert early.reason == "the ack of step 0"


def test_a_take_of_another_step_or_version_is_refused():
    state = make_state()
    for step, version in ((1, 0), (0, 1)):
        with pytest.raises(QueueError, match="expected a take of step 0 at version 0"):
            learner_requests.take(state, LINEAGE, step, version, 0.0)


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


def test_a_returned_group_counts_once():
    state = make_state()
    (lease,) = leases(state, 1)
    assert put(state, group(lease)) == "queued"
    assert put(state, group(lease)) == "duplicate"
    assert state.stats().ledger["tokens"]["received"] == 6


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


def test_a_group_at_the_bound_is_trained():
    # eta = 1. All are sampled at 0; 0 and 1 train at version 0, 2 and 3 at version 1, where their age is 1, the limit.
    state = make_state()
    for lease in leases(state, 4):
        put(state, group(lease, 0))
    take(state)
    ack(state)
    assert positions(take(state)) == [2, 3]


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


def test_a_lease_that_the_taken_step_makes_stale_is_cancelled_at_once():
    # Position 2, leased at version 0, can be trained at 1, and that batch is complete without it.
    state = make_state()
    held = leases(state, 3)
    for lease in held[:2]:
        put(state, group(lease))
    take(state)
    ack(state)
    for lease in leases(state, 2, version=1):
        put(state, group(lease, 1))
    assert dropped(state) == {}
    take(state)
    assert dropped(state) == {"cancelled": 1}
    assert state.generators.pop_cancelled("g0") == {held[2].lease_id}
    ack(state, SKIPPED)
    assert [lease.prompt.position for lease in leases(state, 1, version=1)] == [2]


def test_a_lease_that_cannot_make_it_is_cancelled_and_its_holder_told():
    state = make_state()
    held = leases(state, 3)
    for version in (0, 1):
        for lease in held[:2] if version == 0 else leases(state, 2, version):
            put(state, group(lease, version))
        take(state)
        ack(state)
    assert dropped(state) == {"cancelled": 1}
    assert generator_requests.heartbeat(state, "g0", {}, GeneratorStats(), 1.0) == (held[2].lease_id,)
    assert generator_requests.heartbeat(state, "g0", {}, GeneratorStats(), 1.0) == ()
    assert generator_requests.heartbeat(state, "g0", {held[2].lease_id: 4}, GeneratorStats(), 1.0) == (
        held[2].lease_id,
    )
    # What it still sends is counted, and not used.
    assert put(state, group(held[2], 0)) == "unknown_lease"
    assert state.stats().ledger["tokens"]["dropped"]["cancelled"] == 6
    state.check()


def test_the_last_update_of_a_batch_decides_what_is_too_old():
    # k = 2, eta = 2: a batch taken at v trains last at v + 1, so its oldest is v - 1.
    state = make_state(updates_per_batch=2, max_staleness=2)
    held = leases(state, 2)
    for lease in held:
        put(state, group(lease))
    take(state)
    late = leases(state, 1)
    assert late == []  # (2 + 1 - 0) // 2 = 1 batch
    learner_requests.ack(state, StepAck(LINEAGE, 0, 2, TrainedCounts(True, 4, {}, 12, {})), 0.0)
    announce(state, 2)
    assert leases(state, 1, version=0) == []  # would be 3 versions old at the last update
    assert len(leases(state, 3, version=1)) == 2  # 2 versions old: the bound


def test_a_prompt_that_is_always_too_slow_is_set_aside_apart_from_poison():
    state = make_state(max_attempts=1)
    held = leases(state, 3)
    for version in (0, 1):
        for lease in held[:2] if version == 0 else leases(state, 2, version):
            put(state, group(lease, version))
        take(state)
        ack(state)
    assert dropped(state) == {"too_slow": 1}
    assert 2 not in [lease.prompt.position for lease in leases(state, 9, version=2)]


def test_skipped_steps_in_a_row_do_not_starve_the_learner():
    # Bound 1: three skips in a row are more than eta + 1. The version stays, the step goes on.
    state = make_state(num_steps=4)
    for step in range(3):
        assert fill_and_take(state) == [2 * step, 2 * step + 1]
        ack(state, SKIPPED)
        learner = state.learner
        assert learner is not None
        assert (learner.step, learner.version) == (step + 1, 0)
    assert dropped(state) == {"step_skipped": 6}
    fill_and_take(state)
    ack(state)
    assert groups_of(state)["trained"] == 2
    assert isinstance(take(state), NotReady)


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


def test_failed_rollouts_say_nothing_to_the_filter():
    state = make_state()
    (lease,) = leases(state, 1)
    returned = group(lease, accuracies=(1.0, 0.0))
    good, failed = returned.rollouts
    rollouts = (good, msgspec.structs.replace(failed, finish_reason="error"))
    # Of the two, one failed and the other is right: nothing to learn.
    assert put(state, msgspec.structs.replace(returned, rollouts=rollouts)) == "filtered"


def test_the_filter_is_strict_at_its_edges():
    state = make_state(filter_range=(0.5, 0.9))
    (lease,) = leases(state, 1)
    assert put(state, group(lease, accuracies=(1.0, 0.0))) == "filtered"  # 0.5 is not above 0.5


def test_a_filtered_group_gives_its_capacity_to_the_next_prompt():
    state = make_state(max_staleness=0)
    first, _ = leases(state, 2)
    put(state, group(first, accuracies=(1.0, 1.0)))
    assert [lease.prompt.position for lease in leases(state, 5)] == [2]
    assert groups_of(state)["filtered"] == 1


def test_without_refill_a_filtered_group_is_kept_and_masked():
    state = make_state(refill=False)
    first, second = leases(state, 2)
    put(state, group(first, accuracies=(1.0, 1.0)))
    put(state, group(second))
    taken = take(state)
    assert not isinstance(taken, NotReady)
    assert [item.masked for item in taken] == [True, False]


@pytest.mark.parametrize(
    ("accuracies", "diagnosis"), [((1.0, 1.0), ": 2 had .* at or above"), ((0.0, 0.0), ": 0 had a mean")]
)
def test_a_resumed_run_still_knows_which_filtered_groups_were_right(accuracies, diagnosis):
    state = make_state(max_filtered=3)
    for lease in leases(state, 2):
        put(state, group(lease, accuracies=accuracies))
    snapshot = learner_requests.snapshot(state, LINEAGE, 0.0)
    learner_requests.attach(state, "line-b", LINEAGE, 0, 0, 100, snapshot, 1.0)
    announce(state, 0, "line-b")
    (lease,) = leases(state, 1)
    put(state, group(lease, accuracies=(0.0, 0.0)))
    answer = take(state)
    assert isinstance(answer, NotReady)
    assert re.search(diagnosis, answer.stop), answer.stop


def test_too_many_filtered_groups_without_a_step_stop_the_run():
    state = make_state(max_filtered=3)
    for _ in range(3):
        (lease,) = leases(state, 1)
        put(state, group(lease, accuracies=(0.0, 0.0)))
    answer = take(state)
    assert isinstance(answer, NotReady)
    assert answer.stop.startswith("3 groups were filtered since the last step")
    assert answer.stop.endswith("return a graded accuracy, or set queue.filter_range = []")
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


def test_what_generators_decoded_is_summed_by_the_number_of_sequences():
    state = make_state()
    few, many = GeneratorStats(decoded=(Decoded(1.0, 1.0, 10),)), GeneratorStats(decoded=(Decoded(2.0, 2.0, 5),) * 2)
    generator_requests.heartbeat(state, "g0", {}, few, 1.0)
    generator_requests.heartbeat(state, "g1", {}, many, 1.0)
    assert state.generators.total(1.0).decoded == (Decoded(3.0, 3.0, 15), Decoded(2.0, 2.0, 5))


def test_an_expired_prompt_comes_again_to_another_generator():
    state = make_state()
    (good, lost) = leases(state, 2)
    put(state, group(good))
    state.expire(10.0)
    (other,) = leases(state, 1, generator="g1", now=10.0)  # new prompts come first until a group is good
    put(state, group(other, generator="g1"), now=10.0)
    (again,) = leases(state, 1, generator="g1", now=10.0)
    assert (again.prompt, again.attempt, again.seed) == (lost.prompt, 2, lost.seed)
    assert again.lease_id != lost.lease_id
    assert put(state, group(lost), now=11.0) == "unknown_lease"
    assert put(state, group(again, generator="g1"), now=11.0) == "queued"
    assert groups_of(state)["queued"] == 3


def test_a_prompt_that_keeps_failing_is_poison():
    state = make_state(max_attempts=3, groups_per_step=50)
    assert fail_until_excluded(state, 0) == 4  # the first, before any good group, does not count
    assert dropped(state) == {"failed": 3, "poison": 1}
    assert 0 not in {lease.prompt.position for lease in leases(state, 20)}


def test_a_prompt_that_is_too_long_is_refused_once_and_for_all():
    state = make_state()
    (lease,) = leases(state, 1)
    assert fail(state, lease, "prompt_too_long") == "refused"
    assert dropped(state) == {"refused": 1}
    assert state.stats().prompts_too_long == 1
    assert [lease.prompt.position for lease in leases(state, 1)] == [1]


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


def test_the_last_step_takes_what_is_left_of_the_data_once_nothing_is_in_flight():
    state = make_state(num_rows=3, epochs=1)
    held = leases(state, 9)
    assert len(held) == 3
    for lease in held[:2]:
        put(state, group(lease))
    assert positions(take(state)) == [0, 1]
    ack(state)
    assert isinstance(answer := take(state), NotReady)
    assert not answer.exhausted
    put(state, group(held[2]))
    assert positions(take(state)) == [2]
    assert positions(take(state)) == [2], "a take repeated"
    ack(state, all_trained(1))
    assert isinstance(answer := take(state), NotReady)
    assert (answer.exhausted, answer.reason) == (True, "the data has ended (data.epochs); prompts: 3 trained")
    learner_requests.finish(state, LINEAGE, 0.0)
    assert (groups_of(state)["trained"], dropped(state)) == (3, {})
    assert state.finished


def test_data_of_less_than_a_step_is_one_step():
    state = make_state(num_rows=1, epochs=1)
    (held,) = leases(state, 9)
    assert isinstance(answer := take(state), NotReady)
    assert not answer.exhausted
    put(state, group(held))
    assert positions(take(state)) == [0]


def test_the_rest_waits_for_a_prompt_that_comes_again():
    # Position 2 expires, and comes again: the last step has positions 2 and 3 or waits.
    state = make_state(num_rows=5, epochs=1, max_staleness=2)
    held = leases(state, 9)
    for lease in (*held[:2], *held[3:]):
        put(state, group(lease))
    assert positions(take(state)) == [0, 1]
    ack(state)
    assert positions(take(state)) == [3, 4]
    ack(state)
    assert isinstance(answer := take(state, now=11.0), NotReady)
    assert not answer.exhausted
    assert dropped(state) == {"expired": 1}
    (again,) = leases(state, 9, version=2, now=11.0)
    put(state, group(again, 2), now=11.0)
    assert positions(take(state, now=11.0)) == [2]


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


def test_a_finished_run_gives_no_lease():
    state = make_state()
    leases(state, 2)
    learner_requests.finish(state, LINEAGE, 0.0)
    learner_requests.finish(state, LINEAGE, 0.0)
    assert leases(state, 2) == []
    assert dropped(state) == {"unused_at_end": 2}
    assert len(state.generators.pop_cancelled("g0")) == 2


# Evaluation.


def ask_evaluation(state, *, step: int = 0, exclusive: bool = True, min_version: int = 0, num_rows: int = 2) -> None:
    learner_requests.evaluate(state, "test", step, rows(num_rows), 1, SAMPLING, min_version, exclusive)


def test_an_exclusive_evaluation_comes_before_any_training_lease():
    state = make_state()
    ask_evaluation(state)
    ask_evaluation(state)
    held = leases(state, 9)
    assert [(lease.kind, lease.prompt.row, lease.group_size) for lease in held] == [("eval", 0, 1), ("eval", 1, 1)]
    assert leases(state, 9, generator="g1") == []
    for lease in held:
        assert put(state, group(lease, accuracies=(1.0,))) == "eval_done"
    assert [lease.kind for lease in leases(state, 1)] == ["train"]
    assert state.stats().ledger["eval"]["groups"]["queued"] == 2
    assert groups_of(state)["issued"] == 1


def test_an_evaluation_that_is_not_exclusive_goes_first_but_lets_training_on():
    state = make_state()
    ask_evaluation(state, exclusive=False)
    assert [lease.kind for lease in leases(state, 4)] == ["eval", "eval", "train", "train"]


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


def test_a_learner_that_waits_for_an_evaluation_is_told_how_far_it_is_and_why():
    state = make_state()
    ask_evaluation(state)
    expected = "the evaluation of test at step 0 (0 of 2 rows): no generator is connected"
    assert learner_requests.eval_wait(state, LINEAGE).reason == expected
    leases(state, 2)
    assert learner_requests.eval_wait(state, LINEAGE).reason == "the evaluation of test at step 0 (0 of 2 rows)"


def test_results_come_in_row_order_until_they_are_confirmed():
    state = make_state()
    ask_evaluation(state)
    held = leases(state, 2)
    put(state, group(held[1], accuracies=(1.0,)))
    assert learner_requests.eval_wait(state, LINEAGE).reason.startswith(
        "the evaluation of test at step 0 (1 of 2 rows)"
    )
    fail(state, held[0], "prompt_too_long")
    assert learner_requests.eval_wait(state, LINEAGE).reason == ""
    for _ in range(2):
        (result,) = learner_requests.eval_results(state, LINEAGE)
        assert [(prompt.row, payload is None) for prompt, payload in result.groups] == [(0, True), (1, False)]
    assert learner_requests.eval_results(state, LINEAGE, [("test", 0)]) == []
    ledger = state.stats().ledger["eval"]
    assert (ledger["groups"]["delivered"], ledger["groups"]["dropped"]["refused"]) == (1, 1)
    state.check()


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


def test_a_lost_row_is_sampled_again():
    state = make_state()
    put(state, group(leases(state, 1)[0]))
    ask_evaluation(state, num_rows=1)
    leases(state, 1)
    state.expire(10.0)
    (again,) = leases(state, 1, generator="g1", now=10.0)
    assert (again.kind, again.attempt) == ("eval", 2)


def test_after_the_last_step_only_evaluations_are_given():
    state = make_state(num_steps=1)
    fill_and_take(state)
    ack(state)
    ask_evaluation(state, step=1, min_version=1, num_rows=1)
    assert [lease.kind for lease in leases(state, 9, version=1)] == ["eval"]


# Lineages and snapshots.


def test_only_the_newest_lineage_is_heard():
    state = make_state()
    fill_and_take(state)
    learner_requests.attach(state, "line-b", LINEAGE, 0, 0, 100, None, 1.0)
    for call in (
        lambda: learner_requests.take(state, LINEAGE, 0, 0, 1.0),
        lambda: learner_requests.ack(state, StepAck(LINEAGE, 0, 1, SKIPPED), 1.0),
        lambda: announce(state, 0),
        lambda: learner_requests.finish(state, LINEAGE, 1.0),
        lambda: learner_requests.attach(state, LINEAGE, "", 0, 0, 100, None, 1.0),
    ):
        with pytest.raises(LineageError):
            call()


def test_a_server_without_a_learner_says_that_it_lost_the_state():
    state = make_state(attached=False)
    with pytest.raises(QueueError, match="start the learner again from its checkpoint"):
        learner_requests.take(state, LINEAGE, 0, 0, 0.0)


def test_the_same_learner_attaching_again_changes_nothing():
    state = make_state()
    leases(state, 2)
    learner_requests.attach(state, LINEAGE, "", 0, 0, 100, None, 1.0)
    assert groups_of(state)["in_flight"] == 2


def test_a_new_learner_goes_on_from_the_snapshot_and_the_rest_is_rolled_back():
    # At the ack of step 0: 2 trained, 1 queued (position 2), 1 in flight (position 3). Then one more step is trained.
    state = make_state(max_staleness=2)
    held = leases(state, 4)
    for lease in held[:3]:
        put(state, group(lease))
    take(state)
    snapshot = ack(state, snapshot=True)
    put(state, group(held[3]))
    take(state)
    ack(state)
    assert groups_of(state)["trained"] == 4
    learner_requests.attach(state, "line-b", LINEAGE, 1, 1, 100, snapshot, 5.0)
    ledger = groups_of(state)
    # Issued 4 in the snapshot; after it nothing more was issued. The one in flight then is rolled back.
    assert {k: v for k, v in ledger.items() if k != "dropped"} == {
        "issued": 4, "in_flight": 0, "queued": 1, "taken": 0, "trained": 2, "filtered": 0,
    }  # fmt: skip
    assert dropped(state) == {"rolled_back": 1}
    announce(state, 1, "line-b")
    again = leases(state, 1, version=1)
    assert again[0].prompt.position == 3
    put(state, group(again[0], 1), now=5.0)
    assert positions(take(state)) == [2, 3]


def make_snapshot() -> tuple[QueueState, MemoryPayloads, bytes]:
    """After one step: position 2 queued at 1 s, 3 in flight, 4 failed once; taken at 3 s."""
    payloads = MemoryPayloads()
    state = QueueState(
        settings(max_staleness=2), rows(100), PromptStream(100, seed=0, shuffle=False), payloads=payloads
    )
    learner_requests.attach(state, LINEAGE, "", 0, 0, 100, None, 0.0)
    announce(state, 0)
    held = leases(state, 5)
    for lease in held[:3]:
        put(state, group(lease), now=1.0)
    fail(state, held[4], "engine_error", now=1.0)
    take(state)
    snapshot = ack(state, snapshot=True, now=3.0)
    assert snapshot is not None
    return state, payloads, snapshot


def test_a_snapshot_finds_its_groups_again_though_they_were_trained_since():
    state, payloads, snapshot = make_snapshot()
    for lease in leases(state, 1, version=1, now=3.0):
        put(state, group(lease, 1), now=3.0)
    # Position 4 failed before, so that a new prompt came first.
    assert positions(take(state, now=3.0)) == [2, 5]
    ack(state, now=3.0)
    # Position 5 was not in the snapshot, and its payload is gone; that of 2 is pinned.
    assert len(payloads) == 1
    learner_requests.attach(state, "line-b", LINEAGE, 1, 1, 100, snapshot, 100.0)
    announce(state, 1, "line-b")
    assert [(lease.prompt.position, lease.attempt) for lease in leases(state, 3, 1)] == [(3, 1), (4, 2), (5, 1)]
    assert groups_of(state)["queued"] == 1


def test_a_checkpoint_that_is_committed_lets_go_of_what_older_ones_needed():
    state, payloads, _ = make_snapshot()
    for lease in leases(state, 1, version=1, now=3.0):
        put(state, group(lease, 1), now=3.0)
    take(state, now=3.0)
    ack(state, snapshot=True, now=3.0)
    assert len(payloads) == 1
    assert persistence.status(state, 3.0)["bytes_pinned"] > 0
    learner_requests.checkpoint_committed(state, LINEAGE, 7)  # not a snapshot of this queue
    assert len(payloads) == 1
    learner_requests.checkpoint_committed(state, LINEAGE, 2)
    assert len(payloads) == 0
    assert persistence.status(state, 3.0)["bytes_pinned"] == 0


def test_without_the_bodies_of_a_snapshot_its_prompts_come_again():
    _, _, snapshot = make_snapshot()
    other = make_state(max_staleness=2, attached=False)
    learner_requests.attach(other, "line-b", LINEAGE, 1, 1, 100, snapshot, 100.0)
    announce(other, 1, "line-b")
    next_leases = leases(other, 4, version=1, now=100.0)
    assert [(lease.prompt.position, lease.attempt) for lease in next_leases] == [(2, 1), (3, 1), (5, 1), (6, 1)]
    # One in flight at the snapshot, and one whose payload is gone.
    assert dropped(other) == {"failed": 1, "rolled_back": 2}
    assert decode_group(bytes(put_and_take(other, next_leases)[0].group)).lineage == "line-b"


def test_without_a_snapshot_the_stream_starts_over():
    state = make_state()
    held = leases(state, 2)
    put(state, group(held[0]))
    learner_requests.attach(state, "line-b", LINEAGE, 0, 0, 100, None, 1.0)
    announce(state, 0, "line-b")
    assert put(state, group(held[1])) == "old_lineage"
    assert dropped(state) == {"rolled_back": 2}
    assert [lease.prompt.position for lease in leases(state, 2)] == [0, 1]
    assert state.stats().ledger["tokens"]["dropped"]["rolled_back"] == 12


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


def test_what_is_dropped_can_be_compared_with_what_is_trained():
    state = make_state()
    held = leases(state, 3)
    for lease in held[:2]:
        put(state, group(lease))
    put(state, group(held[2], accuracies=(1.0, 1.0), tokens=8))
    take(state)
    ack(state)
    outcomes = state.stats().ledger["outcomes"]
    assert outcomes["received"] == {"groups": 3, "rollouts": 6, "tokens": 28, "reward": 4.0, "accuracy": 4.0}
    assert outcomes["trained"]["tokens"] == 12
    assert outcomes["filtered"]["tokens"] == 16
