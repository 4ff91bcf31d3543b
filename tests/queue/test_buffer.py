"""The buffer, event by event. By default: 2 groups a step, 2 rollouts a group, 3 tokens a rollout, bound 1."""

import re

import pytest

from async_rl.errors import ConfigError, LineageError, QueueError
from async_rl.net.codec import decode_group
from async_rl.queue.core.batches import TakenPayload
from async_rl.queue.core.buffer import Buffer
from async_rl.queue.core.prompt_stream import PromptStream
from async_rl.queue.messages import GeneratorStats, NotReady, StepAck, TrainedCounts
from async_rl.queue.storage.payloads import MemoryPayloads
from async_rl.records import Lease
from tests.queue.builders import (
    LINEAGE,
    SAMPLING,
    SKIPPED,
    ack,
    announce,
    dropped,
    group,
    groups_of,
    leases,
    make_buffer,
    positions,
    put,
    rows,
    settings,
    take,
)


def put_and_take(buffer: Buffer, held: list[Lease]) -> tuple[TakenPayload, ...]:
    for lease in held:
        put(buffer, group(lease))
    taken = take(buffer)
    assert not isinstance(taken, NotReady)
    return taken


def fill_and_take(buffer, version: int = 0) -> list[int]:
    for lease in leases(buffer, 2, version):
        assert put(buffer, group(lease, version)) == "queued"
    return positions(take(buffer))


# Admission.


def test_leases_stop_at_the_limit_of_steps_within_the_bound():
    # (eta + 1 - (v - m)) // k * G = (1 + 1 - 0) // 1 * 2 = 4.
    buffer = make_buffer()
    assert len(leases(buffer, 4)) == 4
    granted = buffer.lease("g0", (LINEAGE, 0), 1, 0.0)
    assert granted.leases == ()
    assert granted.activate is None
    assert "limit 4 groups: 0 taken, 4 in flight, 0 queued" in granted.reason


@pytest.mark.parametrize(
    ("updates", "staleness", "behind", "limit"),
    [
        (1, 0, 0, 2),  # (0 + 1 - 0) // 1 * 2
        (1, 4, 0, 10),  # (4 + 1 - 0) // 1 * 2
        (1, 4, 4, 2),  # (4 + 1 - 4) // 1 * 2
        (1, 4, 5, 0),
        (2, 4, 0, 4),  # (4 + 1 - 0) // 2 * 2
        (2, 4, 3, 2),  # (4 + 1 - 3) // 2 * 2
        (2, 4, 4, 0),  # (4 + 1 - 4) // 2 = 0
    ],
)
def test_the_limit_counts_whole_batches_of_updates(updates, staleness, behind, limit):
    s = settings(updates_per_batch=updates, max_staleness=staleness)
    assert s.group_limit(version=10, active_version=10 - behind, steps_left=99, bound=staleness) == limit


def test_no_more_groups_are_leased_than_the_steps_left_need():
    buffer = make_buffer(num_steps=1, max_staleness=4)
    assert len(leases(buffer, 20)) == 2


def test_an_old_generator_is_told_the_version_that_lets_it_go_on():
    buffer = make_buffer(max_staleness=1)
    fill_and_take(buffer)
    ack(buffer)
    held = leases(buffer, 9, version=0)
    # v = 1, m = 0: (2 - 1) * 2 = 2 groups; with m = 1 it would be 4.
    assert len(held) == 2
    granted = buffer.lease("g0", (LINEAGE, 0), 1, 0.0)
    assert granted.activate == 1
    assert len(leases(buffer, 9, version=1)) == 2
    assert buffer.lease("g0", (LINEAGE, 1), 1, 0.0).activate is None


def test_a_generator_of_another_lineage_activates_first():
    buffer = make_buffer()
    granted = buffer.lease("g0", ("other", 7), 4, 0.0)
    assert (granted.leases, granted.activate) == ((), 0)


def test_each_lease_names_the_oldest_version_that_its_batch_can_still_train():
    # v = 3, eta = 1: the first batch trains at 3 (oldest 2), the second at 4 (oldest 3).
    s = settings()
    oldest = [s.oldest_for_lease(version=3, outstanding=n, bound=1) for n in range(4)]
    assert oldest == [2, 2, 3, 3]


def test_a_lower_bound_gives_no_lease_until_what_is_there_is_within_it_and_all_of_it_is_trained():
    # Bound 4: (4 + 1) * 2 = 10 groups, all returned. At bound 1 there is room for (1 + 1) * 2 = 4.
    buffer = make_buffer(max_staleness=4)
    for lease in leases(buffer, 99):
        put(buffer, group(lease))
    for version, queued, given in ((1, 8, 0), (2, 6, 0), (3, 4, 0), (4, 2, 2)):
        take(buffer)
        ack(buffer, lease_bound=1)
        assert groups_of(buffer)["queued"] == queued
        new = leases(buffer, 99, version)
        assert len(new) == given
    # Before them comes one batch, trained at 4: theirs is trained at 5, and they may be 1 version old.
    assert {lease.min_version for lease in new} == {4}
    assert positions(take(buffer)) == [8, 9]
    assert dropped(buffer) == {}


@pytest.mark.parametrize(("bound", "limit"), [(0, 2), (3, 8), (4, 10), (None, 10)])
def test_an_ack_sets_the_bound_for_the_leases_after_it(bound: int | None, limit: int):
    # (bound + 1) * 2 groups; none is max_staleness.
    buffer = make_buffer(max_staleness=4)
    fill_and_take(buffer)
    ack(buffer, lease_bound=1)
    fill_and_take(buffer, 1)
    ack(buffer, lease_bound=bound)
    assert len(leases(buffer, 99, 2)) == limit


def test_an_old_generator_is_told_the_version_that_a_lower_bound_asks_for():
    buffer = make_buffer(max_staleness=4)
    fill_and_take(buffer)
    ack(buffer, lease_bound=0)
    granted = buffer.lease("g0", (LINEAGE, 0), 9, 0.0)
    assert (granted.leases, granted.activate) == ((), 1)


@pytest.mark.parametrize("bound", [-1, 0, 5])
def test_a_bound_out_of_its_limits_is_refused_and_changes_nothing(bound: int):
    # Published every second version: samples are 1 version old at times, and a bound of 0 would wait for ever.
    buffer = make_buffer(max_staleness=4, sync_every=2)
    fill_and_take(buffer)
    with pytest.raises(QueueError, match=rf"expected a bound for new leases of 1\.\.4, got {bound}"):
        ack(buffer, lease_bound=bound)
    assert groups_of(buffer)["taken"] == 2
    ack(buffer, lease_bound=1)
    assert buffer.status(0.0)["lease_bound"] == 1


def test_a_bound_comes_back_with_its_snapshot_and_goes_without_one():
    buffer = make_buffer(max_staleness=4)
    fill_and_take(buffer)
    snapshot = ack(buffer, snapshot=True, lease_bound=2)
    fill_and_take(buffer, 1)
    ack(buffer, lease_bound=3)
    buffer.attach("line-b", LINEAGE, 1, 1, 100, snapshot, 1.0)
    assert buffer.status(1.0)["lease_bound"] == 2
    buffer.attach("line-c", "line-b", 0, 0, 100, None, 1.0)
    assert buffer.status(1.0)["lease_bound"] == 4


def test_a_lease_is_not_given_when_its_worst_case_does_not_fit():
    # worst case of a group: 2 * ((8 + 8) * 13 + 1024) + 4096 = 6560 bytes.
    assert settings().worst_case_bytes == 6560
    buffer = make_buffer(max_staleness=9, max_bytes=3 * 6560)
    assert len(leases(buffer, 9)) == 3
    assert "queue.max_bytes" in buffer.lease("g0", (LINEAGE, 0), 1, 0.0).reason


def test_a_queue_that_cannot_hold_one_step_is_refused():
    settings(max_bytes=2 * 6560)
    with pytest.raises(ConfigError, match=r"queue\.max_bytes"):
        settings(max_bytes=2 * 6560 - 1)


def test_versions_too_rare_for_the_bound_are_refused():
    settings(max_staleness=2, sync_every=2, updates_per_batch=2)
    with pytest.raises(ConfigError, match="sync_every"):
        settings(max_staleness=2, sync_every=3, updates_per_batch=2)


def test_seeds_depend_on_the_place_and_the_run_alone():
    a, b = make_buffer(), make_buffer()
    first = {lease.prompt.position: lease.seed for lease in leases(a, 4, generator="x")}
    second = {lease.prompt.position: lease.seed for lease in leases(b, 4, generator="y")}
    assert first == second
    assert len(set(first.values())) == 4
    assert all(0 <= seed < 2**63 for seed in first.values())


# Delivery.


def test_groups_are_taken_in_stream_order_whatever_their_arrival():
    buffer = make_buffer()
    held = leases(buffer, 4)
    for index in (3, 1, 2, 0):
        put(buffer, group(held[index]))
    assert positions(take(buffer)) == [0, 1]


def test_groups_leased_with_an_older_version_go_first():
    buffer = make_buffer(max_staleness=2)
    slow = leases(buffer, 3)
    for lease in slow[:2]:
        put(buffer, group(lease))
    take(buffer)
    ack(buffer)
    # Position 2 comes again after 3: a lease asked with version 0 still goes before one asked with 1.
    fresh = leases(buffer, 2, version=1)
    for lease in (*fresh, slow[2]):
        put(buffer, group(lease, 1))
    assert positions(take(buffer)) == [2, 3]


def test_a_take_repeated_gives_the_same_groups_until_it_is_acked():
    buffer = make_buffer()
    held = leases(buffer, 4)
    for lease in held[:2]:
        put(buffer, group(lease))
    first = take(buffer)
    put(buffer, group(held[2]))
    assert take(buffer) == first
    assert groups_of(buffer)["taken"] == 2


def test_an_ack_repeated_changes_nothing():
    buffer = make_buffer()
    fill_and_take(buffer)
    facts = TrainedCounts(True, 4, {}, 12, {})
    first = buffer.ack(StepAck(LINEAGE, 0, 1, facts, snapshot=True), 0.0)
    before = groups_of(buffer)
    assert buffer.ack(StepAck(LINEAGE, 0, 1, facts, snapshot=True), 5.0).snapshot is first.snapshot
    assert groups_of(buffer) == before
    assert before["trained"] == 2


def test_a_take_that_overtakes_the_ack_before_it_waits():
    buffer = make_buffer()
    fill_and_take(buffer)
    early = buffer.take(LINEAGE, 1, 1, 2, 0.0)
    assert isinstance(early, NotReady)
    assert early.reason == "waits for the ack of step 0"


def test_a_take_of_another_step_or_version_is_refused():
    buffer = make_buffer()
    for step, version in ((1, 0), (0, 1)):
        with pytest.raises(QueueError, match="expected a take of step 0 at version 0"):
            buffer.take(LINEAGE, step, version, 2, 0.0)


def test_facts_that_do_not_add_up_are_refused_and_change_nothing():
    buffer = make_buffer()
    fill_and_take(buffer)
    # 2 groups of 2 rollouts of 3 tokens: 4 rollouts, 12 tokens.
    with pytest.raises(QueueError, match="12 that were taken"):
        buffer.ack(StepAck(LINEAGE, 0, 1, TrainedCounts(True, 4, {}, 11, {})), 0.0)
    assert groups_of(buffer)["taken"] == 2


def test_masked_and_failed_rollouts_are_counted_by_cause():
    buffer = make_buffer()
    fill_and_take(buffer)
    facts = TrainedCounts(True, 1, {"truncated": 2, "failed": 1}, 3, {"truncated": 6, "failed": 3})
    ack(buffer, facts)
    ledger = buffer.stats().ledger
    assert ledger["rollouts"]["trained"] == 1
    assert ledger["rollouts"]["masked"] == {"truncated": 2}
    assert ledger["rollouts"]["failed"] == 1
    assert ledger["tokens"]["masked"] == {"truncated": 6, "failed": 3}
    buffer.check()


def test_a_returned_group_counts_once():
    buffer = make_buffer()
    (lease,) = leases(buffer, 1)
    assert put(buffer, group(lease)) == "queued"
    assert put(buffer, group(lease)) == "duplicate"
    assert buffer.stats().ledger["tokens"]["received"] == 6


def test_a_group_that_does_not_fit_its_lease_is_refused_and_sampled_again():
    buffer = make_buffer()
    first, second, third = leases(buffer, 3)
    assert put(buffer, group(first, accuracies=(1.0, 0.0, 1.0))) == "refused"
    assert put(buffer, group(second, version=1)) == "refused"  # the learner is at 0
    assert put(buffer, group(third, finish_reason="error")) == "refused"
    assert dropped(buffer) == {"refused": 2, "failed": 1}
    assert [lease.prompt.position for lease in leases(buffer, 3)] == [0, 1, 2]


# Consumption.


def test_a_group_at_the_bound_is_trained():
    # eta = 1. All are sampled at 0; 0 and 1 train at version 0, 2 and 3 at version 1, where their age is 1, the limit.
    buffer = make_buffer()
    for lease in leases(buffer, 4):
        put(buffer, group(lease, 0))
    take(buffer)
    ack(buffer)
    assert positions(take(buffer)) == [2, 3]


def test_a_group_that_aged_above_the_bound_in_the_queue_is_dropped():
    # At version 1, position 4 comes back sampled by 0, though its lease wanted 1: young enough now, too old at 2.
    buffer = make_buffer()
    fill_and_take(buffer)
    ack(buffer)
    held = leases(buffer, 3, version=1)
    for lease, version in zip(held, (1, 1, 0), strict=True):
        assert put(buffer, group(lease, version)) == "queued"
    assert positions(take(buffer)) == [2, 3]
    ack(buffer)
    assert dropped(buffer) == {"stale": 1}
    again = leases(buffer, 1, version=2)
    assert (again[0].prompt.position, again[0].attempt) == (4, 2)


def test_a_lease_that_the_taken_step_makes_stale_is_cancelled_at_once():
    # Position 2, leased at version 0, can be trained at 1, and that batch is complete without it.
    buffer = make_buffer()
    held = leases(buffer, 3)
    for lease in held[:2]:
        put(buffer, group(lease))
    take(buffer)
    ack(buffer)
    for lease in leases(buffer, 2, version=1):
        put(buffer, group(lease, 1))
    assert dropped(buffer) == {}
    take(buffer)
    assert dropped(buffer) == {"cancelled": 1}
    assert buffer.pop_cancelled("g0") == (held[2].lease_id,)
    ack(buffer, SKIPPED)
    assert [lease.prompt.position for lease in leases(buffer, 1, version=1)] == [2]


def test_a_lease_that_cannot_make_it_is_cancelled_and_its_holder_told():
    buffer = make_buffer()
    held = leases(buffer, 3)
    for version in (0, 1):
        for lease in held[:2] if version == 0 else leases(buffer, 2, version):
            put(buffer, group(lease, version))
        take(buffer)
        ack(buffer)
    assert dropped(buffer) == {"cancelled": 1}
    assert buffer.heartbeat("g0", {}, GeneratorStats(), 1.0) == (held[2].lease_id,)
    assert buffer.heartbeat("g0", {}, GeneratorStats(), 1.0) == ()
    assert buffer.heartbeat("g0", {held[2].lease_id: 4}, GeneratorStats(), 1.0) == (held[2].lease_id,)
    # What it still sends is counted, and not used.
    assert put(buffer, group(held[2], 0)) == "unknown_lease"
    assert buffer.stats().ledger["tokens"]["dropped"]["cancelled"] == 6
    buffer.check()


def test_the_last_update_of_a_batch_decides_what_is_too_old():
    # k = 2, eta = 2: a batch taken at v trains last at v + 1, so its oldest is v - 1.
    buffer = make_buffer(updates_per_batch=2, max_staleness=2)
    held = leases(buffer, 2)
    for lease in held:
        put(buffer, group(lease))
    take(buffer)
    late = leases(buffer, 1)
    assert late == []  # (2 + 1 - 0) // 2 = 1 batch
    buffer.ack(StepAck(LINEAGE, 0, 2, TrainedCounts(True, 4, {}, 12, {})), 0.0)
    announce(buffer, 2)
    assert leases(buffer, 1, version=0) == []  # would be 3 versions old at the last update
    assert len(leases(buffer, 3, version=1)) == 2  # 2 versions old: the bound


def test_a_prompt_that_is_always_too_slow_is_set_aside_apart_from_poison():
    buffer = make_buffer(max_attempts=1)
    held = leases(buffer, 3)
    for version in (0, 1):
        for lease in held[:2] if version == 0 else leases(buffer, 2, version):
            put(buffer, group(lease, version))
        take(buffer)
        ack(buffer)
    assert dropped(buffer) == {"too_slow": 1}
    assert 2 not in [lease.prompt.position for lease in leases(buffer, 9, version=2)]


def test_skipped_steps_in_a_row_do_not_starve_the_learner():
    # Bound 1: three skips in a row are more than eta + 1. The version stays, the step goes on.
    buffer = make_buffer(num_steps=4)
    for step in range(3):
        assert fill_and_take(buffer) == [2 * step, 2 * step + 1]
        ack(buffer, SKIPPED)
        learner = buffer.learner
        assert learner is not None
        assert (learner.step, learner.version) == (step + 1, 0)
    assert dropped(buffer) == {"step_skipped": 6}
    fill_and_take(buffer)
    ack(buffer)
    assert groups_of(buffer)["trained"] == 2
    assert isinstance(take(buffer), NotReady)


# Filter.


@pytest.mark.parametrize(
    ("accuracies", "verdict"), [((1.0, 1.0), "filtered"), ((0.0, 0.0), "filtered"), ((1.0, 0.0), "queued")]
)
def test_groups_without_signal_are_filtered(accuracies, verdict):
    buffer = make_buffer()
    (lease,) = leases(buffer, 1)
    assert put(buffer, group(lease, accuracies=accuracies)) == verdict


def test_the_filter_is_strict_at_its_edges():
    buffer = make_buffer(filter_range=(0.5, 0.9))
    (lease,) = leases(buffer, 1)
    assert put(buffer, group(lease, accuracies=(1.0, 0.0))) == "filtered"  # 0.5 is not above 0.5


def test_a_filtered_group_gives_its_capacity_to_the_next_prompt():
    buffer = make_buffer(max_staleness=0)
    first, _ = leases(buffer, 2)
    put(buffer, group(first, accuracies=(1.0, 1.0)))
    assert [lease.prompt.position for lease in leases(buffer, 5)] == [2]
    assert groups_of(buffer)["filtered"] == 1


def test_without_refill_a_filtered_group_is_kept_and_masked():
    buffer = make_buffer(refill=False)
    first, second = leases(buffer, 2)
    put(buffer, group(first, accuracies=(1.0, 1.0)))
    put(buffer, group(second))
    taken = take(buffer)
    assert not isinstance(taken, NotReady)
    assert [item.masked for item in taken] == [True, False]


@pytest.mark.parametrize(
    ("accuracies", "diagnosis"), [((1.0, 1.0), "2 with .* at or above"), ((0.0, 0.0), "0 with a mean")]
)
def test_a_resumed_run_still_knows_which_filtered_groups_were_right(accuracies, diagnosis):
    buffer = make_buffer(max_filtered=3)
    for lease in leases(buffer, 2):
        put(buffer, group(lease, accuracies=accuracies))
    snapshot = buffer.snapshot(LINEAGE, 0.0)
    buffer.attach("line-b", LINEAGE, 0, 0, 100, snapshot, 1.0)
    announce(buffer, 0, "line-b")
    (lease,) = leases(buffer, 1)
    put(buffer, group(lease, accuracies=(0.0, 0.0)))
    answer = take(buffer)
    assert isinstance(answer, NotReady)
    assert re.search(diagnosis, answer.stop), answer.stop


def test_too_many_filtered_groups_without_a_step_stop_the_run():
    buffer = make_buffer(max_filtered=3)
    for _ in range(3):
        (lease,) = leases(buffer, 1)
        put(buffer, group(lease, accuracies=(0.0, 0.0)))
    answer = take(buffer)
    assert isinstance(answer, NotReady)
    assert answer.stop.startswith("3 groups were filtered since the last step")
    assert leases(buffer, 1) == []


# Failures.


def test_a_lease_lives_only_while_its_progress_grows():
    buffer = make_buffer()
    alive, stuck = leases(buffer, 2)
    stats = GeneratorStats()
    buffer.heartbeat("g0", {alive.lease_id: 1, stuck.lease_id: 0}, stats, 6.0)
    assert buffer.next_deadline == 10.0
    assert buffer.heartbeat("g0", {alive.lease_id: 1, stuck.lease_id: 0}, stats, 10.0) == (stuck.lease_id,)
    assert dropped(buffer) == {"expired": 1}
    assert buffer.expire(15.9) == 0
    assert buffer.expire(16.0) == 1  # the same progress as at 6


def test_an_expired_prompt_comes_again_to_another_generator():
    buffer = make_buffer()
    (lost,) = leases(buffer, 1)
    buffer.expire(10.0)
    (again,) = leases(buffer, 1, generator="g1", now=10.0)
    assert (again.prompt, again.attempt, again.seed) == (lost.prompt, 2, lost.seed)
    assert again.lease_id != lost.lease_id
    assert put(buffer, group(lost), now=11.0) == "unknown_lease"
    assert put(buffer, group(again, generator="g1"), now=11.0) == "queued"
    assert groups_of(buffer)["queued"] == 1


def test_a_prompt_that_keeps_failing_is_poison():
    buffer = make_buffer(max_attempts=3)
    for _ in range(3):
        (lease,) = leases(buffer, 1)
        assert lease.prompt.position == 0
        buffer.fail("g0", lease.lease_id, "engine_error", 0.0)
    assert dropped(buffer) == {"failed": 2, "poison": 1}
    assert [lease.prompt.position for lease in leases(buffer, 1)] == [1]


def test_a_prompt_that_is_too_long_is_refused_once_and_for_all():
    buffer = make_buffer()
    (lease,) = leases(buffer, 1)
    assert buffer.fail("g0", lease.lease_id, "prompt_too_long", 0.0) == "refused"
    assert dropped(buffer) == {"refused": 1}
    assert buffer.stats().prompts_too_long == 1
    assert [lease.prompt.position for lease in leases(buffer, 1)] == [1]


def test_an_epoch_of_refused_prompts_stops_the_run():
    buffer = make_buffer(num_rows=3)
    for _ in range(3):
        (lease,) = leases(buffer, 1)
        assert isinstance(answer := take(buffer), NotReady)
        assert not answer.stop
        buffer.fail("g0", lease.lease_id, "prompt_too_long", 0.0)
    assert isinstance(answer := take(buffer), NotReady)
    assert "every prompt of epoch 0 was excluded (3 were longer than sampling.max_prompt_tokens = 8" in answer.stop


def test_a_generator_that_leaves_gives_its_leases_back_unblamed():
    buffer = make_buffer(max_attempts=1)
    leases(buffer, 2)
    buffer.goodbye("g0", 1.0)
    assert dropped(buffer) == {"cancelled": 2}
    assert [lease.attempt for lease in leases(buffer, 2, generator="g1")] == [1, 1]


def test_who_takes_a_dead_generators_place_has_its_leases_given_out_again_at_once():
    # What killed it may have been the prompt, so an attempt is counted.
    buffer = make_buffer(max_attempts=2)
    (held, _), (other,) = leases(buffer, 2), leases(buffer, 1, generator="g1")
    buffer.hello("g0-1", "h", "fake", 1.0, replaces="g0")
    assert dropped(buffer) == {"expired": 2}
    assert [(lease.prompt.position, lease.attempt) for lease in leases(buffer, 2, generator="g0-1")] == [(0, 2), (1, 2)]
    assert put(buffer, group(other, generator="g1")) == "queued"
    assert put(buffer, group(held)) == "unknown_lease"
    buffer.hello("g0-1", "h", "fake", 2.0, replaces="g0")
    assert dropped(buffer) == {"expired": 2}, "it may say so again"


# The ends.


def test_the_end_of_the_data_is_said_once_nothing_is_in_flight():
    buffer = make_buffer(num_rows=3, epochs=1)
    held = leases(buffer, 9)
    assert len(held) == 3
    for lease in held[:2]:
        put(buffer, group(lease))
    take(buffer)
    ack(buffer)
    assert isinstance(answer := take(buffer), NotReady)
    assert not answer.exhausted
    put(buffer, group(held[2]))
    assert isinstance(answer := take(buffer), NotReady)
    assert answer.exhausted
    buffer.finish(LINEAGE, 0.0)
    assert dropped(buffer) == {"unused_at_end": 1}
    assert buffer.finished


def test_a_finished_run_gives_no_lease():
    buffer = make_buffer()
    leases(buffer, 2)
    buffer.finish(LINEAGE, 0.0)
    buffer.finish(LINEAGE, 0.0)
    assert leases(buffer, 2) == []
    assert dropped(buffer) == {"unused_at_end": 2}
    assert len(buffer.pop_cancelled("g0")) == 2


# Evaluation.


def ask_evaluation(buffer, *, step: int = 0, exclusive: bool = True, min_version: int = 0, num_rows: int = 2) -> None:
    buffer.evaluate("test", step, rows(num_rows), 1, SAMPLING, min_version, exclusive)


def test_an_exclusive_evaluation_comes_before_any_training_lease():
    buffer = make_buffer()
    ask_evaluation(buffer)
    ask_evaluation(buffer)
    held = leases(buffer, 9)
    assert [(lease.kind, lease.prompt.row, lease.group_size) for lease in held] == [("eval", 0, 1), ("eval", 1, 1)]
    assert leases(buffer, 9, generator="g1") == []
    for lease in held:
        assert put(buffer, group(lease, accuracies=(1.0,))) == "eval_done"
    assert [lease.kind for lease in leases(buffer, 1)] == ["train"]
    assert buffer.stats().ledger["eval"]["groups"]["queued"] == 2
    assert groups_of(buffer)["issued"] == 1


def test_an_evaluation_that_is_not_exclusive_goes_first_but_lets_training_on():
    buffer = make_buffer()
    ask_evaluation(buffer, exclusive=False)
    assert [lease.kind for lease in leases(buffer, 4)] == ["eval", "eval", "train", "train"]


def test_an_evaluation_waits_for_its_version():
    buffer = make_buffer()
    fill_and_take(buffer)
    buffer.ack(StepAck(LINEAGE, 0, 1, TrainedCounts(True, 4, {}, 12, {})), 0.0)
    ask_evaluation(buffer, step=1, min_version=1)
    assert buffer.lease("g0", (LINEAGE, 0), 1, 0.0).activate is None  # version 1 is not announced yet
    announce(buffer, 1)
    assert buffer.lease("g0", (LINEAGE, 0), 1, 0.0).activate == 1
    assert [lease.min_version for lease in leases(buffer, 1, version=1)] == [1]


def test_an_evaluation_of_a_version_to_come_lets_training_go_on_with_the_next_one():
    # As under learner.fixed_lag: version 2 is trained, 1 is announced, and the evaluation waits for 2. The bound has
    # room for version 1 alone: (1 + 1 - (2 - 1)) * 2 = 2 groups.
    buffer = make_buffer()
    fill_and_take(buffer)
    ack(buffer)
    fill_and_take(buffer, 1)
    ack(buffer, announced=False)
    buffer.evaluate("test", 2, rows(1), 1, SAMPLING, 2, False)
    granted = buffer.lease("g0", (LINEAGE, 0), 4, 0.0)
    assert (granted.leases, granted.activate) == ((), 1)
    assert len(leases(buffer, 4, 1)) == 2


def test_results_come_in_row_order_until_they_are_confirmed():
    buffer = make_buffer()
    ask_evaluation(buffer)
    held = leases(buffer, 2)
    put(buffer, group(held[1], accuracies=(1.0,)))
    assert buffer.eval_wait(LINEAGE).endswith("test at step 0: 1 of 2 rows")
    buffer.fail("g0", held[0].lease_id, "prompt_too_long", 0.0)
    assert buffer.eval_wait(LINEAGE) == ""
    for _ in range(2):
        (result,) = buffer.eval_results(LINEAGE)
        assert [(prompt.row, payload is None) for prompt, payload in result.answers] == [(0, True), (1, False)]
    assert buffer.eval_results(LINEAGE, [("test", 0)]) == []
    ledger = buffer.stats().ledger["eval"]
    assert (ledger["groups"]["delivered"], ledger["groups"]["dropped"]["refused"]) == (1, 1)
    buffer.check()


def test_a_lost_row_is_sampled_again():
    buffer = make_buffer()
    ask_evaluation(buffer, num_rows=1)
    leases(buffer, 1)
    buffer.expire(10.0)
    (again,) = leases(buffer, 1, generator="g1", now=10.0)
    assert (again.kind, again.attempt) == ("eval", 2)


def test_after_the_last_step_only_evaluations_are_given():
    buffer = make_buffer(num_steps=1)
    fill_and_take(buffer)
    ack(buffer)
    ask_evaluation(buffer, step=1, min_version=1, num_rows=1)
    assert [lease.kind for lease in leases(buffer, 9, version=1)] == ["eval"]


# Lineages and snapshots.


def test_only_the_newest_lineage_is_heard():
    buffer = make_buffer()
    fill_and_take(buffer)
    buffer.attach("line-b", LINEAGE, 0, 0, 100, None, 1.0)
    for call in (
        lambda: buffer.take(LINEAGE, 0, 0, 2, 1.0),
        lambda: buffer.ack(StepAck(LINEAGE, 0, 1, SKIPPED), 1.0),
        lambda: announce(buffer, 0),
        lambda: buffer.finish(LINEAGE, 1.0),
        lambda: buffer.attach(LINEAGE, "", 0, 0, 100, None, 1.0),
    ):
        with pytest.raises(LineageError):
            call()


def test_a_server_without_a_learner_says_that_it_lost_the_state():
    buffer = make_buffer(attached=False)
    with pytest.raises(QueueError, match="start the learner again from its checkpoint"):
        buffer.take(LINEAGE, 0, 0, 2, 0.0)


def test_the_same_learner_attaching_again_changes_nothing():
    buffer = make_buffer()
    leases(buffer, 2)
    buffer.attach(LINEAGE, "", 0, 0, 100, None, 1.0)
    assert groups_of(buffer)["in_flight"] == 2


def test_a_new_learner_goes_on_from_the_snapshot_and_the_rest_is_rolled_back():
    # At the ack of step 0: 2 trained, 1 queued (position 2), 1 in flight (position 3). Then one more step is trained.
    buffer = make_buffer(max_staleness=2)
    held = leases(buffer, 4)
    for lease in held[:3]:
        put(buffer, group(lease))
    take(buffer)
    snapshot = ack(buffer, snapshot=True)
    put(buffer, group(held[3]))
    take(buffer)
    ack(buffer)
    assert groups_of(buffer)["trained"] == 4
    buffer.attach("line-b", LINEAGE, 1, 1, 100, snapshot, 5.0)
    ledger = groups_of(buffer)
    # Issued 4 in the snapshot; after it nothing more was issued. The one in flight then is rolled back.
    assert {k: v for k, v in ledger.items() if k != "dropped"} == {
        "issued": 4, "in_flight": 0, "queued": 1, "taken": 0, "trained": 2, "filtered": 0,
    }  # fmt: skip
    assert dropped(buffer) == {"rolled_back": 1}
    announce(buffer, 1, "line-b")
    again = leases(buffer, 1, version=1)
    assert again[0].prompt.position == 3
    put(buffer, group(again[0], 1), now=5.0)
    assert positions(take(buffer)) == [2, 3]


def make_snapshot() -> tuple[Buffer, MemoryPayloads, bytes]:
    """After one step: position 2 queued at 1 s, 3 in flight, 4 failed once; taken at 3 s."""
    payloads = MemoryPayloads()
    buffer = Buffer(settings(max_staleness=2), rows(100), PromptStream(100, seed=0, shuffle=False), payloads=payloads)
    buffer.attach(LINEAGE, "", 0, 0, 100, None, 0.0)
    announce(buffer, 0)
    held = leases(buffer, 5)
    for lease in held[:3]:
        put(buffer, group(lease), now=1.0)
    buffer.fail("g0", held[4].lease_id, "engine_error", 1.0)
    take(buffer)
    snapshot = ack(buffer, snapshot=True, now=3.0)
    assert snapshot is not None
    return buffer, payloads, snapshot


def test_a_snapshot_finds_its_groups_again_though_they_were_trained_since():
    buffer, payloads, snapshot = make_snapshot()
    for lease in leases(buffer, 1, version=1, now=3.0):
        put(buffer, group(lease, 1), now=3.0)
    assert positions(take(buffer, now=3.0)) == [2, 4]
    ack(buffer, now=3.0)
    # Position 4 was not in the snapshot, and its payload is gone; that of 2 is pinned.
    assert len(payloads) == 1
    buffer.attach("line-b", LINEAGE, 1, 1, 100, snapshot, 100.0)
    announce(buffer, 1, "line-b")
    assert [(lease.prompt.position, lease.attempt) for lease in leases(buffer, 3, 1)] == [(3, 1), (4, 2), (5, 1)]
    assert groups_of(buffer)["queued"] == 1


def test_a_checkpoint_that_is_committed_lets_go_of_what_older_ones_needed():
    buffer, payloads, _ = make_snapshot()
    for lease in leases(buffer, 1, version=1, now=3.0):
        put(buffer, group(lease, 1), now=3.0)
    take(buffer, now=3.0)
    ack(buffer, snapshot=True, now=3.0)
    assert len(payloads) == 1
    assert buffer.status(3.0)["bytes_pinned"] > 0
    buffer.checkpoint_committed(LINEAGE, 7)  # not a snapshot of this queue
    assert len(payloads) == 1
    buffer.checkpoint_committed(LINEAGE, 2)
    assert len(payloads) == 0
    assert buffer.status(3.0)["bytes_pinned"] == 0


def test_without_the_bodies_of_a_snapshot_its_prompts_come_again():
    _, _, snapshot = make_snapshot()
    other = make_buffer(max_staleness=2, attached=False)
    other.attach("line-b", LINEAGE, 1, 1, 100, snapshot, 100.0)
    announce(other, 1, "line-b")
    next_leases = leases(other, 4, version=1, now=100.0)
    assert [(lease.prompt.position, lease.attempt) for lease in next_leases] == [(2, 1), (3, 1), (4, 2), (5, 1)]
    # One in flight at the snapshot, and one whose payload is gone.
    assert dropped(other) == {"failed": 1, "rolled_back": 2}
    assert decode_group(bytes(put_and_take(other, next_leases)[0].payload)).lineage == "line-b"


def test_without_a_snapshot_the_stream_starts_over():
    buffer = make_buffer()
    held = leases(buffer, 2)
    put(buffer, group(held[0]))
    buffer.attach("line-b", LINEAGE, 0, 0, 100, None, 1.0)
    announce(buffer, 0, "line-b")
    assert put(buffer, group(held[1])) == "old_lineage"
    assert dropped(buffer) == {"rolled_back": 2}
    assert [lease.prompt.position for lease in leases(buffer, 2)] == [0, 1]
    assert buffer.stats().ledger["tokens"]["dropped"]["rolled_back"] == 12


def test_a_damaged_or_foreign_snapshot_is_refused():
    buffer = make_buffer()
    fill_and_take(buffer)
    snapshot = ack(buffer, snapshot=True)
    assert snapshot is not None
    damaged = snapshot[:-1] + bytes([snapshot[-1] ^ 1])
    with pytest.raises(QueueError, match="checksum"):
        buffer.attach("line-b", LINEAGE, 1, 1, 100, damaged, 1.0)
    with pytest.raises(QueueError, match="expected a snapshot"):
        buffer.attach("line-b", LINEAGE, 2, 2, 100, snapshot, 1.0)
    learner = buffer.learner
    assert learner is not None
    assert learner.lineage == LINEAGE


def test_what_is_dropped_can_be_compared_with_what_is_trained():
    buffer = make_buffer()
    held = leases(buffer, 3)
    for lease in held[:2]:
        put(buffer, group(lease))
    put(buffer, group(held[2], accuracies=(1.0, 1.0), tokens=9))
    take(buffer)
    ack(buffer)
    outcomes = buffer.stats().ledger["outcomes"]
    assert outcomes["received"] == {"groups": 3, "rollouts": 6, "tokens": 30, "reward": 4.0, "accuracy": 4.0}
    assert outcomes["trained"]["tokens"] == 12
    assert outcomes["filtered"]["tokens"] == 18
