"""Generators that are too slow for the staleness bound, and how far sampling runs ahead: by hand, and in the core."""

from __future__ import annotations

import math

import pytest

from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.pace import SLACK, Paces, RunAhead, Window
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import GeneratorStats
from tests.queue.builders import LINEAGE, SAMPLING, ack, group, leases, make_state, positions, put, rows, take

WINDOW = Window(batches=3, groups_per_step=8, learner_s=10.0, max_staleness=2)


def others_sample() -> bool:
    return True


def end(paces: Paces, name: str, *leases: tuple[int, float]) -> None:
    """A warm generator returns groups of so many tokens after so many seconds."""
    paces.pace_of(name).warm_at = 0.0
    for tokens, lease_s in leases:
        paces.ended(name, tokens, 0.0, lease_s, is_returned=True)


def fleet(*slow: tuple[int, float]) -> Paces:
    """A generator that has returned 8 groups of 100 tokens, each in 10 s and 4 at a time, and one with leases of
    ``slow``: tokens and seconds of each.
    """
    paces = Paces()
    paces.granted("fast", 4)
    end(paces, "fast", *[(100, 10.0)] * 8)
    end(paces, "slow", *slow)
    return paces


def test_a_generator_whose_groups_take_longer_than_the_bound_admits_is_too_slow():
    # The fast one samples 4 groups in 10 s, so a batch of 8 takes 20 s, longer than the learner: three batches, 60 s.
    # The slow one has 1 token/s where the fast one has 10: a group takes it 100 s, in which 5 batches are trained.
    paces = fleet((100, 100.0))
    assert paces.check("slow", WINDOW, 0.0, others_sample) == paces.why("slow") == (
        "too slow for a staleness bound of 2: a group takes it about 100 s (the others 10 s), in which the run trains "
        "5 batches without it; it still gets evaluations, and is tried again in 1600 s"
    )  # fmt: skip
    assert paces.check("fast", WINDOW, 0.0, others_sample) == ""
    assert paces.check("new", WINDOW, 0.0, others_sample) == ""


@pytest.mark.parametrize(
    ("window", "slow", "reason"),
    [
        (Window(6, 8, 10.0, 5), [(100, 100.0)], "six batches take 120 s"),
        (Window(3, 8, 40.0, 2), [(100, 100.0)], "the learner takes 40 s for a batch"),
        (Window(1, 8, 0.0, 0), [(200, 50.0), (200, 50.0)], "4 tokens/s: not three times as slow"),
        (WINDOW, [(1000, 100.0)], "its answers are long"),
        (WINDOW, [(50, 50.0)], "leases of 50 s are too little to know: six groups of the others take 60 s"),
    ],
)
def test_a_generator_that_is_slower_gets_leases_if(window: Window, slow: list[tuple[int, float]], reason: str):
    assert fleet(*slow).check("slow", window, 0.0, others_sample) == "", reason


def test_a_generator_that_samples_nothing_is_slow_and_one_alone_never_is():
    assert "too slow" in fleet((0, 100.0)).check("slow", WINDOW, 0.0, others_sample)
    paces = fleet((0, 100.0))
    paces.remove("fast")
    assert paces.check("slow", WINDOW, 0.0, others_sample) == ""


def state_with_a_slow_generator() -> QueueState:
    """At 100 s, "fast" has returned 9 groups that took it 1 s each, and "slow" two that took it 20 s, in batches of 4
    groups. The bound of 1 admits two batches, which the fast one samples in 8 s.
    """
    state = make_state(groups_per_step=4, lease_timeout_s=1000.0, generator_timeout_s=200.0)
    for name, first, seconds, number in (("slow", 0, 20, 2), ("fast", 40, 1, 9)):
        for begin in range(first, first + seconds * number, seconds):
            (lease,) = leases(state, 1, generator=name, now=float(begin))
            returned = group(lease, generator=name, accuracies=(1.0, 1.0))
            assert put(state, returned, now=float(begin + seconds)) == "filtered"
    state.set_clock(100.0)
    return state


def test_the_queue_gives_a_slow_generator_evaluations_alone_and_says_why():
    state = state_with_a_slow_generator()
    (held,) = leases(state, 1, generator="fast", now=100.0)
    refused = generator_requests.lease(state, "slow", (LINEAGE, 0), 1, 100.0)
    why = "too slow for a staleness bound of 1: a group takes it about 20 s (the others 1 s), in which the run"
    assert refused.leases == ()
    assert refused.reason.startswith(f"this generator is {why}")
    assert [text.partition(", because it is ")[2].startswith(why) for text in state.news] == [True]
    shown = {entry["id"]: entry["too_slow"] for entry in state.generators.as_dicts(state.now)}
    assert shown["fast"] == ""
    assert shown["slow"].startswith(why)
    assert not generator_requests.may_have_leases(state, "slow"), "what it is refused, others may have"
    learner_requests.evaluate(state, "test", 0, rows(2), 1, SAMPLING, 0, False)
    assert [lease.kind for lease in leases(state, 3, generator="slow", now=101.0)] == ["eval", "eval"]
    assert len(state.news) == 1, "said once"
    assert held.lease_id in {active.lease.lease_id for active in state.leases}


def test_progress_that_no_lease_allows_makes_nobody_else_slow():
    # "honest" takes 20 s for a group. A lease has two answers of 8 tokens at most, and a member claims a million.
    state = make_state(groups_per_step=4, lease_timeout_s=1000.0, generator_timeout_s=200.0)
    for name, first, number in (("honest", 0, 8), ("member", 160, 7)):
        for begin in range(first, first + 20 * number, 20):
            (lease,) = leases(state, 1, generator=name, now=float(begin))
            if name == "member":
                claimed = {lease.lease_id: 10**6}
                generator_requests.heartbeat(state, name, claimed, GeneratorStats(), begin + 1.0)
            returned = group(lease, generator=name, accuracies=(1.0, 1.0), tokens=8)
            assert put(state, returned, now=begin + 20.0) == "filtered"
    (held,) = leases(state, 1, generator="member", now=300.0)
    assert [lease.kind for lease in leases(state, 1, generator="honest", now=300.0)] == ["train"], held.lease_id


@pytest.mark.parametrize(("leaves", "now"), [(True, 102.0), (False, 250.0)], ids=["has left", "is silent since 49 s"])
def test_a_slow_generator_samples_when_no_other_is_left(leaves: bool, now: float):
    state = state_with_a_slow_generator()
    assert leases(state, 3, generator="slow", now=100.0) == []
    if leaves:
        generator_requests.goodbye(state, "fast", 101.0)
    assert len(leases(state, 3, generator="slow", now=now)) == 3
    assert {entry["too_slow"] for entry in state.generators.as_dicts(state.now)} == {""}


def test_a_generator_on_trial_has_one_lease():
    state = state_with_a_slow_generator()
    assert leases(state, 3, generator="slow", now=100.0) == []
    generator_requests.heartbeat(state, "fast", {}, GeneratorStats(), 400.0)
    (lease,) = leases(state, 3, generator="slow", now=420.0)  # 16 times 20 s after the refusal
    assert leases(state, 3, generator="slow", now=421.0) == []
    assert put(state, group(lease, generator="slow"), now=421.0) == "queued"
    assert len(leases(state, 3, generator="slow", now=422.0)) == 3, "it took 1 s, as the others"


# How far sampling runs ahead: no batch that a step waits for is held back.


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


@pytest.mark.parametrize(("setting", "limit"), [("bound", math.inf), (0.0, 8), (1.0, 16), (2.5, 28)])
def test_a_number_is_that_of_the_batches_beyond_the_one_that_is_trained(setting: float, limit: float):
    assert RunAhead(setting, 8).limit(0.0) == limit


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


def test_the_metrics_say_how_far_sampling_may_be_ahead_and_whether_it_was_held_back_in_the_step():
    pace = timed(group_s=10.0, step_s=10.0)
    pace.hold(26, 5.0)
    pace.trained(10.0)
    known = {"time/group_s": 10.0, "time/own_step_s": 10.0, "queue/run_ahead_limit": 26, "queue/run_ahead_slack": SLACK}
    assert pace.metrics(10.0) == {**known, "queue/run_ahead_held": 1.0}
    pace.took(10.0)
    pace.trained(20.0)
    assert pace.metrics(20.0)["queue/run_ahead_held"] == 0.0
    assert RunAhead("bound", 8).metrics(0.0) == {}
