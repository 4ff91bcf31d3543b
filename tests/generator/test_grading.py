"""Samples to rollouts, one at a time or a group at a time."""

import sys
import threading
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.generator.backend import Sampled
from async_rl.generator.rollouts import ActiveLease, Graded, ThreadGrader
from async_rl.records import FinishReason, Lease
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import RewardInput
from tests.generator.leases import make_lease
from tests.generator.scripted import InlineGrader


def sample(lease: Lease, index: int, text: str) -> Sampled:
    one = np.ones(1, np.int32)
    return Sampled(lease.lease_id, index, one, one, np.zeros(1, np.float32), one, "stop", text)


def rank(items: Sequence[RewardInput]) -> list[float]:
    """1 for the first, a half for the second: an order that only a whole group has."""
    return [1 / (1 + index) for index, _ in enumerate(items)]


def right(item: RewardInput) -> float:
    return float(item.text == item.reward_data["gt_answer"])


def reward_of(function: object) -> FunctionReward:
    return FunctionReward("mine:f", function, scale=1.0, time_limit_s=5.0)  # pyright: ignore[reportArgumentType]


def accuracies(graded: Sequence[Graded]) -> list[tuple[int, float]]:
    return [(one.index, one.rollout.accuracy) for one in graded if one.rollout is not None]


def collect(grader: ThreadGrader, count: int) -> list[Graded]:
    graded: list[Graded] = []
    pause = threading.Event()
    while len(graded) < count:
        graded += grader.collect()
        pause.wait(0.001)  # polls as the loop does; the test's own time limit bounds it
    return graded


@pytest.mark.parametrize("kind", [InlineGrader, ThreadGrader])
def test_a_reward_of_groups_waits_for_the_whole_group_and_sees_it_in_order(
    kind: type[ThreadGrader],
):
    grader, a, b = kind(reward_of(rank)), make_lease("a"), make_lease("b")
    grader.submit(a, sample(a, 1, "x"))
    grader.submit(b, sample(b, 0, "y"))
    assert (grader.collect(), grader.num_pending) == ([], 0)
    grader.submit(a, sample(a, 0, "z"))
    graded = collect(grader, 2)
    assert accuracies(graded) == [(0, 1.0), (1, 0.5)]
    assert {one.lease.lease_id for one in graded} == {"a"}
    grader.close()


@pytest.mark.parametrize(
    ("texts", "finish_reason", "example"),
    [
        (("x" * 200, "so it is 3"), "stop", "so it is 3"),  # both are wrong
        (("so it is 3", "x" * 200), "stop", "x" * 120),
        (("2", "so it is 3"), "stop", ""),  # one is right
        (("2", "so it is 3"), "length", "so it is 3"),  # all are cut
    ],
)
def test_a_group_whose_answers_say_little_takes_along_the_end_of_one(
    texts: tuple[str, str], finish_reason: FinishReason, example: str
):
    grader, lease = InlineGrader(reward_of(right)), make_lease("a", group_size=2)
    active = ActiveLease(lease, np.ones(1, np.int32), 0.0)
    for index, text in enumerate(texts):
        grader.submit(lease, replace(sample(lease, index, text), finish_reason=finish_reason))
        for graded in grader.collect():
            assert graded.rollout is not None
            active.add(graded.index, graded.rollout, graded.failure, graded.text)
    assert active.is_complete
    assert active.group("g", {0: "digest", 1: "digest"}, 1.0).example == example


def test_samples_of_a_lease_that_is_gone_are_forgotten():
    # The same lease id given out again needs both of its samples anew.
    grader, lease = InlineGrader(reward_of(rank)), make_lease("a")
    grader.submit(lease, sample(lease, 0, "x"))
    grader.forget("a")
    grader.submit(lease, sample(lease, 1, "x"))
    assert grader.collect() == []
    grader.submit(lease, sample(lease, 0, "x"))
    assert accuracies(grader.collect()) == [(0, 1.0), (1, 0.5)]


def of_group(items: Sequence[RewardInput]) -> str:
    return "no list"


def of_answer(item: RewardInput) -> float:
    if item.text == "leave":
        sys.exit("the reward leaves")
    return 1000.0 if item.text == "too much" else 1.0 / len(item.text.strip("x"))


@pytest.mark.parametrize(
    ("function", "texts", "reasons", "detail"),
    [
        (of_answer, ("1", "x"), ["stop", "error"], f"ZeroDivisionError: float division by zero ({__file__}, line "),
        (of_answer, ("1", "too much"), ["stop", "error"], "at most reward.max_abs = 100"),
        (of_answer, ("1", "leave"), ["stop", "error"], "SystemExit: the reward leaves"),
        (of_group, ("1", "2"), ["error", "error"], "expected a list"),
    ],
    ids=["raises", "above the limit", "leaves", "of a group"],
)
def test_a_reward_that_fails_for_an_answer_fails_that_rollout_alone(
    function: object, texts: tuple[str, str], reasons: list[str], detail: str
):
    with closing(ThreadGrader(reward_of(function), max_abs=100.0)) as grader:
        lease = make_lease("a")
        for index, text in enumerate(texts):
            grader.submit(lease, sample(lease, index, text))
        graded = sorted(collect(grader, 2), key=lambda one: one.index)
        assert grader.calls_s == ()
    assert [one.rollout.finish_reason for one in graded if one.rollout] == reasons
    for one in graded:
        if one.rollout is not None and one.rollout.finish_reason == "error":
            assert one.rollout.reward_parts == {}
            assert one.failure is not None
            assert (one.failure.cause, one.failure.is_transient) == ("reward_error", False)
            assert detail in one.failure.detail


def test_a_running_call_is_told_with_its_time():
    goes_on, began = threading.Event(), threading.Event()

    def hang(item: RewardInput) -> float:
        began.set()
        goes_on.wait(10.0)
        return 1.0

    with closing(ThreadGrader(reward_of(hang))) as grader:
        lease = make_lease("a")
        grader.submit(lease, sample(lease, 0, "x"))
        assert began.wait(10.0)
        assert 0.0 <= grader.calls_s[0] < 20.0
        goes_on.set()
        collect(grader, 1)
        assert grader.calls_s == ()
