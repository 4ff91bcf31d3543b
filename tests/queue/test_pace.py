"""Generators that are too slow for the staleness bound: by hand, in the queue's core, and in simulated runs."""

from __future__ import annotations

import pytest

from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.pace import Paces, Window
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import GeneratorStats
from tests.queue.builders import LINEAGE, SAMPLING, group, leases, make_state, put, rows
from tests.queue.slow_fleet import predict

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
        (WINDOW, [(50, 50.0)], "leases of 50 s are too little to know: six groups of the others take 60 s"),
    ],
)
def test_a_generator_that_is_slower_gets_leases_if(window: Window, slow: list[tuple[int, float]], reason: str):
    assert fleet(*slow).check("slow", window, 0.0, others_sample) == "", reason


def test_long_answers_make_nobody_slow():
    assert fleet((1000, 100.0)).check("slow", WINDOW, 0.0, others_sample) == ""


def test_a_generator_that_samples_nothing_is_slow_and_one_alone_never_is():
    assert "too slow" in fleet((0, 100.0)).check("slow", WINDOW, 0.0, others_sample)
    paces = fleet((0, 100.0))
    paces.remove("fast")
    assert paces.check("slow", WINDOW, 0.0, others_sample) == ""


def test_after_a_pause_one_lease_shows_whether_it_is_still_slow():
    paces = fleet((100, 100.0))
    assert paces.check("slow", WINDOW, 5.0, others_sample)
    assert paces.check("slow", WINDOW, 5.0 + 1599.0, others_sample)
    assert paces.check("slow", WINDOW, 5.0 + 1600.0, others_sample) == ""
    assert paces.pace_of("slow").is_on_trial
    end(paces, "slow", (100, 100.0))
    assert not paces.pace_of("slow").is_on_trial
    assert paces.check("slow", WINDOW, 1705.0, others_sample), "slow as before"
    assert paces.check("slow", WINDOW, 1705.0 + 1600.0, others_sample) == ""
    end(paces, "slow", (100, 10.0))
    assert paces.check("slow", WINDOW, 3400.0, others_sample) == "", "as fast as the others now"


def test_leases_of_an_engine_that_warms_up_do_not_count():
    paces = fleet()
    paces.pace_of("slow").warm_at = None
    for ended_at in (100.0, 110.0, 120.0):
        paces.ended("slow", 100, 0.0, ended_at, is_returned=True)
    assert paces.pace_of("slow").lease_s == 0
    paces.ended("slow", 100, 100.0, 200.0, is_returned=True)
    assert "too slow" in paces.check("slow", WINDOW, 200.0, others_sample), "it was granted when the first had ended"


def test_old_leases_count_less_and_less():
    paces = fleet((100, 100.0))
    end(paces, "slow", *[(100, 10.0)] * 300)
    assert paces.pace_of("slow").groups < 128
    assert paces.pace_of("slow").lease_s / paces.pace_of("slow").groups < 10.5


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


def test_a_slow_generator_samples_when_no_other_is_left():
    state = state_with_a_slow_generator()
    assert leases(state, 3, generator="slow", now=100.0) == []
    generator_requests.goodbye(state, "fast", 101.0)
    assert len(leases(state, 3, generator="slow", now=102.0)) == 3


def test_a_slow_generator_samples_once_the_others_are_silent():
    state = state_with_a_slow_generator()
    assert leases(state, 3, generator="slow", now=100.0) == []
    assert len(leases(state, 3, generator="slow", now=250.0)) == 3  # the last message was at 49 s
    assert {entry["too_slow"] for entry in state.generators.as_dicts(state.now)} == {""}


def test_a_generator_on_trial_has_one_lease():
    state = state_with_a_slow_generator()
    assert leases(state, 3, generator="slow", now=100.0) == []
    generator_requests.heartbeat(state, "fast", {}, GeneratorStats(), 400.0)
    (lease,) = leases(state, 3, generator="slow", now=420.0)  # 16 times 20 s after the refusal
    assert leases(state, 3, generator="slow", now=421.0) == []
    assert put(state, group(lease, generator="slow"), now=421.0) == "queued"
    assert len(leases(state, 3, generator="slow", now=422.0)) == 3, "it took 1 s, as the others"


@pytest.mark.parametrize(("on_stale", "bound"), [("mask", 1), ("drop", 1), ("wait", 1), ("wait", 4), ("wait", 8)])
def test_a_slow_generator_costs_little_speed_and_much_without_the_rule(on_stale: str, bound: int):
    alone, slow = predict(on_stale, bound, [1, 1, 1]).steps_per_s, [1, 1, 1, 1 / 8]
    assert predict(on_stale, bound, slow).steps_per_s >= 0.93 * alone
    assert predict(on_stale, bound, slow, has_rule=False).steps_per_s <= 0.92 * alone


def test_a_slow_generator_that_is_in_time_helps():
    # The fast one takes 80 s for a batch of 16 groups, and the slow ones about 80 s for a group.
    assert predict("mask", 4, [1, 1 / 4, 1 / 4]).steps_per_s > 1.4 * predict("mask", 4, [1]).steps_per_s
