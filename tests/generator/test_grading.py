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
from async_rl.rewards.records import RewardInput, RewardOutput
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


def wrong_type(items: Sequence[RewardInput]) -> str:
    return "no list"


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


def test_closing_waits_for_the_answer_that_is_being_scored_and_drops_the_others(monkeypatch: pytest.MonkeyPatch):
    begun, go, scored = threading.Event(), threading.Event(), []

    def slow(item: RewardInput) -> float:
        scored.append(item)
        begun.set()
        assert go.wait(30)
        return 1.0

    grader, lease = ThreadGrader(reward_of(slow)), make_lease("a")
    for index in range(2):
        grader.submit(lease, sample(lease, index, "x"))
    assert begun.wait(30)
    (thread,) = grader._threads
    join = thread.join

    def go_on_and_join() -> None:
        go.set()
        join(30)

    monkeypatch.setattr(thread, "join", go_on_and_join)
    grader.close()
    assert len(scored) == 1


def test_threads_start_only_for_calls_that_overlap():
    go, begun = threading.Event(), threading.Semaphore(0)

    def slow(item: RewardInput) -> RewardOutput:
        if item.text == "slow":
            begun.release()
            assert go.wait(30)
        return RewardOutput({"right": 1.0}, 1.0)

    with closing(ThreadGrader(slow, num_threads=3)) as grader:
        lease = make_lease("a")
        assert not grader._threads
        for index in range(4):  # one after the other
            grader.submit(lease, sample(lease, index, "quick"))
            collect(grader, 1)
        assert len(grader._threads) == 1
        for index in range(5):
            grader.submit(lease, sample(lease, index, "slow"))
        num_begun = sum(begun.acquire(timeout=10) for _ in range(3))
        go.set()
        assert (num_begun, len(grader._threads)) == (3, 3)
        assert len(collect(grader, 5)) == 5


def test_other_rewards_do_not_wait():
    grader, lease = InlineGrader(reward_of(right)), make_lease("a")
    grader.submit(lease, sample(lease, 1, "2"))
    assert accuracies(grader.collect()) == [(1, 1.0)]


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


def test_an_error_is_every_rollouts_of_the_group():
    grader, lease = InlineGrader(reward_of(wrong_type)), make_lease("a")
    for index in (0, 1):
        grader.submit(lease, sample(lease, index, "x"))
    graded = grader.collect()
    assert [(one.index, one.rollout and one.rollout.finish_reason) for one in graded] == [(0, "error"), (1, "error")]
    assert all(one.failure is not None and one.failure.cause == "reward_error" for one in graded)
    assert all("expected a list" in str(one.error) for one in graded)


def test_a_reward_that_raises_for_one_answer_fails_that_rollout_alone():
    def picky(item: RewardInput) -> float:
        return 1.0 / len(item.text.strip("x"))

    grader, lease = InlineGrader(reward_of(picky)), make_lease("a")
    for index, text in enumerate(("1", "x")):
        grader.submit(lease, sample(lease, index, text))
    good, failed = grader.collect()
    assert (good.failure, good.rollout and good.rollout.reward) == (None, 1.0)
    assert failed.rollout is not None
    assert (failed.rollout.finish_reason, failed.rollout.reward_parts) == ("error", {})
    assert failed.failure is not None
    assert failed.failure.detail.startswith(f"ZeroDivisionError: float division by zero ({__file__}, line ")
    assert not failed.failure.is_transient


def test_a_reward_above_the_limit_fails_its_rollout_and_is_never_sent():
    with closing(ThreadGrader(reward_of(lambda item: float(item.text)), max_abs=100.0)) as grader:
        lease = make_lease("a")
        for index, text in enumerate(("7", "101")):
            grader.submit(lease, sample(lease, index, text))
        good, failed = collect(grader, 2)
    assert (good.failure, good.rollout and good.rollout.reward) == (None, 7.0)
    assert failed.failure is not None
    assert "at most reward.max_abs = 100" in failed.failure.detail


def leave(item: RewardInput) -> float:
    if item.text == "leave":
        sys.exit("the reward leaves")
    return 1.0


def test_a_reward_that_leaves_fails_its_rollout_and_no_thread():
    with closing(ThreadGrader(reward_of(leave))) as grader:
        lease = make_lease("a")
        for index, text in enumerate(("leave", "stay")):
            grader.submit(lease, sample(lease, index, text))
        failed, good = collect(grader, 2)
        assert grader.calls_s == ()
    assert failed.failure is not None
    assert failed.failure.detail.startswith("SystemExit: the reward leaves")
    assert good.failure is None


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
