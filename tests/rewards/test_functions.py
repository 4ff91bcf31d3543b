"""Calls of user functions at the same time: how many, for how long, and how they end."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from async_rl.errors import RewardError
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import RewardInput


def rollout(text: str, gold: str = "2") -> RewardInput:
    return RewardInput(text, {"gt_answer": gold}, 10, 100, "stop")


def as_reward(function: Callable[..., Any], **settings: Any) -> FunctionReward:
    name = f"mine:{getattr(function, '__name__', 'f')}"
    return FunctionReward(name, function, **{"scale": 1.0, "time_limit_s": 5.0, **settings})


def test_async_calls_of_many_answers_run_at_once_and_none_waits_for_a_whole_group():
    # Twelve threads score an answer each; each call waits until all twelve have begun.
    begun: list[str] = []
    loops: set[int] = set()  # one, so that a session can be kept

    async def judged(item: RewardInput) -> float:
        begun.append(item.text)
        loops.add(id(asyncio.get_running_loop()))
        while len(begun) < 12:
            await asyncio.sleep(0.001)
        return float(item.text == "2")

    reward = as_reward(judged, max_concurrent=12)
    with closing(reward), ThreadPoolExecutor(12) as threads:
        outputs = list(threads.map(reward, [rollout("2" if i % 2 else "3") for i in range(12)]))
    assert [output.accuracy for output in outputs] == [0.0, 1.0] * 6
    assert len(loops) == 1


def test_no_more_async_calls_run_at_once_than_are_allowed_and_waiting_costs_no_time_of_the_limit():
    # Ten calls of 50 ms, two at a time, last 250 ms; each has 200 ms, which only its own count against.
    running = most = 0

    async def judged(item: RewardInput) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return 1.0

    with closing(as_reward(judged, max_concurrent=2, time_limit_s=0.2)) as reward:
        assert all(output.accuracy == 1.0 for output in reward.score_group([rollout("2")] * 10))
    assert most == 2


def test_a_hanging_call_costs_its_own_answer_only():
    async def judged(item: RewardInput) -> float:
        if item.text == "hang":
            await asyncio.Event().wait()
        return 1.0

    with closing(as_reward(judged, time_limit_s=0.2)) as reward, ThreadPoolExecutor(3) as threads:
        hanging = threads.submit(reward, rollout("hang"))
        others = [threads.submit(reward, rollout("2")) for _ in range(8)]
        assert all(other.result().accuracy == 1.0 for other in others)
        with pytest.raises(RewardError, match=r"took longer than reward\.time_limit_s"):
            hanging.result()


def test_calls_that_run_when_the_reward_is_closed_are_cancelled():
    began, ended = threading.Event(), threading.Event()

    async def judged(item: RewardInput) -> float:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    reward = as_reward(judged, time_limit_s=60.0)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(reward, rollout("2"))
        assert began.wait(30)
        reward.close()
        assert ended.is_set()
        with pytest.raises(CancelledError):
            call.result()


def test_a_plain_function_is_never_called_twice_at_once():
    inside = threading.Lock()

    def careless(item: RewardInput) -> float:
        assert inside.acquire(blocking=False)
        time.sleep(0.002)
        inside.release()
        return 1.0

    with ThreadPoolExecutor(4) as threads:
        assert all(output.accuracy for output in threads.map(as_reward(careless), [rollout("2")] * 12))
