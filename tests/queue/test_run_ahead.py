"""How far sampling runs ahead: the limit by hand, and that no batch that a step waits for is held back."""

import math

import pytest

from async_rl.queue.core import generator_requests
from async_rl.queue.core.pace import SLACK, RunAhead
from tests.queue.builders import LINEAGE, ack, group, leases, make_state, positions, put, take


def timed(
    *, group_s: float, step_s: float, filtered: float = 0.0, groups_per_step: int = 8, num_steps: int = 1
) -> RunAhead:
    """A pace that has seen ``num_steps`` steps of ``step_s`` seconds, and now trains a batch since 0.0."""
    pace = RunAhead("auto", groups_per_step)
    for before in reversed(range(num_steps)):
        pace.took(-step_s * (before + 1))
        pace.trained(-step_s * before)
    pace.took(0.0)
    pace.group_s, pace.filtered = group_s, filtered
    return pace


@pytest.mark.parametrize(
    ("group_s", "step_s", "filtered", "limit"),
    [
        (10.0, 10.0, 0.0, 26),  # 8 (2 + 1.2) = 25.6
        (100.0, 10.0, 0.0, 112),  # 8 (2 + 12)
        (10.0, 10.0, 0.5, 36),  # 8 (2 + 2.4) = 35.2
        (0.1, 10.0, 0.0, 17),  # 8 (2 + 0.012) = 16.1
    ],
)
def test_the_limit_is_one_batch_trained_one_ready_and_what_is_in_flight_at_the_learners_rate(
    group_s: float, step_s: float, filtered: float, limit: int
):
    assert timed(group_s=group_s, step_s=step_s, filtered=filtered).limit(5.0) == limit


def test_until_a_step_and_a_group_are_timed_three_batches_are_given():
    pace = RunAhead("auto", 8)
    assert pace.limit(0.0) == 24
    pace.returned(5.0, is_filtered=False)
    assert pace.limit(1e6) == 24  # the first step waits for its batch, which says nothing of the learner
    pace.took(10.0)
    pace.trained(20.0)
    assert pace.limit(20.0) == 21  # 8 (2 + 1.2 * 5 / 10) = 20.8


def test_a_restarted_server_that_knows_no_group_yet_gives_more_while_a_step_waits():
    pace = RunAhead("auto", 8)
    pace.took(0.0)  # of groups that returned before the restart
    pace.trained(10.0)
    assert [pace.limit(now) for now in (10.0, 12.5, 15.0)] == [24, 26, 28]


@pytest.mark.parametrize(("setting", "limit"), [("bound", math.inf), (0.0, 8), (1.0, 16), (2.5, 28)])
def test_a_number_is_that_of_the_batches_beyond_the_one_that_is_trained(setting: float, limit: float):
    assert RunAhead(setting, 8).limit(0.0) == limit


def test_a_step_with_a_checkpoint_does_not_change_the_learners_pace_and_three_slower_ones_do():
    pace = RunAhead("auto", 8)
    now = 0.0
    for seconds, known in ((10, 10), (10, 10), (50, 10), (10, 10), (10, 10), (30, 10), (30, 30), (30, 30)):
        pace.took(now)
        now += seconds
        pace.trained(now)
        assert pace.step_s == known


def test_lengths_that_triple_are_known_within_four_batches():
    pace = RunAhead("auto", 8)
    for _ in range(100):
        pace.returned(10.0, is_filtered=False)
    for _ in range(4 * 8):
        pace.returned(30.0, is_filtered=True)
    # (1 - 1/16) ** 32 = 0.127 of the old value is left.
    assert pace.group_s == pytest.approx(30 - 0.127 * 20, abs=0.1)
    assert pace.filtered == pytest.approx(0.873, abs=0.01)


def test_the_slack_grows_with_a_wait_while_leases_were_held_back_and_shrinks_again():
    pace = timed(group_s=10.0, step_s=10.0, num_steps=5)
    pace.hold(26, 5.0)
    pace.trained(10.0)
    pace.took(10.1)  # 1 % of a step is no wait
    assert pace.slack == SLACK
    pace.hold(26, 15.0)
    pace.trained(20.1)
    pace.took(22.1)
    assert pace.slack == pytest.approx(1.2 * 1.1)  # a fifth of a step: 1 + 0.5 / 5
    pace.hold(26, 27.1)
    pace.trained(32.1)
    pace.took(132.1)  # nothing was held back of which groups could have come
    assert pace.slack == pytest.approx(1.32 * 0.998)
    pace.hold(26, 142.0)
    pace.trained(142.1)
    pace.took(161.0)  # more than a step counts as one
    assert pace.slack == pytest.approx(1.32 * 0.998 * 1.5)
    for step in range(300):
        pace.trained(171.0 + 10 * step)
        pace.took(171.0 + 10 * step)
    assert pace.slack == SLACK


def test_waits_of_the_first_five_steps_leave_the_slack_alone():
    pace = timed(group_s=10.0, step_s=10.0, num_steps=3)
    for now, slack in ((10.0, SLACK), (30.0, 1.5 * SLACK)):  # the first has four steps behind it, the second five
        pace.hold(26, now)
        pace.trained(now)
        pace.took(now + 10.0)
        assert pace.slack == pytest.approx(slack)


def test_while_a_step_waits_a_quarter_of_a_batch_more_is_given_in_each_quarter_of_a_step():
    pace = timed(group_s=10.0, step_s=8.0, groups_per_step=4)
    assert pace.limit(0.0) == 14  # 4 (2 + 1.2 * 10 / 8)
    pace.trained(8.0)
    assert pace.next_change(8.0) is None  # nobody asks for more
    pace.hold(14, 8.0)
    times, now = list[float](), 8.0
    for expected in (15, 16, 17):
        assert not pace.has_grown(now)
        now = pace.next_change(now) or 0.0
        times.append(now)
        assert pace.has_grown(now)
        assert pace.limit(now) == expected
    assert times == [10.0, 12.0, 14.0]


def test_leases_wait_while_sampling_is_far_enough_ahead_and_the_reason_says_so():
    state = make_state(max_staleness=16, run_ahead="auto")  # 2 groups a step
    assert len(leases(state, 20)) == 6
    granted = generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0)
    assert granted.activate is None
    assert granted.reason == "sampling is far enough ahead: limit 6 groups: 0 taken, 6 in flight, 0 queued"


def test_a_lost_generator_does_not_hold_back_the_batch_that_a_step_waits_for():
    state = make_state(max_staleness=16, run_ahead="auto", lease_timeout_s=1e6)
    for now in (0.0, 10.0, 20.0):
        for lease in leases(state, 2, now=now):
            put(state, group(lease, lease.min_version), now=now + 1)
        assert len(positions(take(state, now=now + 1))) == 2
        ack(state, now=now + 10)
    stuck = leases(state, 20, version=3, generator="lost", now=30.0)
    assert len(stuck) == 5  # 2 (2 + 1.2 * 1 / 9) = 4.3
    assert leases(state, 20, version=3, generator="alive", now=30.0) == []
    revision = state.revision
    for quarters in (1, 2):  # 4.3 + 2 / 4 groups, then 4.3 + 2 * 2 / 4
        assert state.revision == revision
        deadline = 30.0 + quarters * 9 / 4
        assert state.next_deadline == deadline
        state.expire(deadline)
    assert state.revision > revision  # so the requests that wait are tried again
    assert len(leases(state, 20, version=3, generator="alive", now=30.0 + 9)) == 2


def test_the_metrics_have_the_limit_its_parts_and_whether_a_lease_was_held_back_in_the_step():
    pace = timed(group_s=10.0, step_s=10.0)
    known = {"time/group_s": 10.0, "time/own_step_s": 10.0, "queue/run_ahead_limit": 26, "queue/run_ahead_slack": 1.2}
    pace.trained(10.0)
    assert pace.metrics(10.0) == {**known, "queue/run_ahead_held": 0.0}
    pace.took(10.0)
    pace.hold(26, 12.0)
    pace.trained(20.0)
    assert pace.metrics(20.0) == {**known, "queue/run_ahead_held": 1.0}
    pace.took(20.0)
    pace.trained(30.0)
    assert pace.metrics(30.0)["queue/run_ahead_held"] == 0.0


def test_before_anything_is_known_and_without_pace_the_metrics_are_those_that_exist():
    assert RunAhead("auto", 8).metrics(0.0) == {
        "queue/run_ahead_limit": 24, "queue/run_ahead_held": 0.0, "queue/run_ahead_slack": 1.2
    }  # fmt: skip
    assert RunAhead("bound", 8).metrics(0.0) == {}
    assert RunAhead(1.0, 8).metrics(0.0) == {"queue/run_ahead_limit": 16, "queue/run_ahead_held": 0.0}
