"""Functions of the user's own as rewards: every form, what they may return, and sums of several."""

import asyncio
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.config.config import Config
from async_rl.config.reward import REWARD_TYPES
from async_rl.errors import ConfigError, RewardError
from async_rl.generator.start.worker import grading_threads
from async_rl.registry import our_offers
from async_rl.rewards.functions import MAX_CONCURRENT_CALLS, FunctionReward
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import REWARDS, build_reward


def rollout(text: str, gold: str = "2") -> RewardInput:
    return RewardInput(text, {"gt_answer": gold}, 10, 100, "stop")


def as_reward(function: Callable[..., Any], **settings: Any) -> FunctionReward:
    name = f"mine:{getattr(function, '__name__', 'f')}"
    return FunctionReward(name, function, **{"scale": 1.0, "time_limit_s": 5.0, **settings})


def test_a_number_is_reward_and_accuracy():
    def half(item: RewardInput) -> float:
        return 0.5 if item.text else 0.0

    assert as_reward(half, scale=10.0)(rollout("a")) == RewardOutput({"half": 5.0}, 0.5)
    assert not as_reward(half).needs_whole_group


def test_a_number_outside_0_and_1_is_a_reward_without_an_accuracy():
    def points(item: RewardInput) -> float:
        return float(item.text)

    assert as_reward(points, scale=2.0)(rollout("-3")) == RewardOutput({"points": -6.0}, -3.0)


def test_a_truth_value_is_a_number():
    def right(item: RewardInput) -> bool:
        return item.text == item.reward_data["gt_answer"]

    assert as_reward(right)(rollout("2")) == RewardOutput({"right": 1.0}, 1.0)
    assert as_reward(right)(rollout("3")) == RewardOutput({"right": 0.0}, 0.0)


def test_a_reward_output_tells_reward_and_accuracy_apart():
    def scored(item: RewardInput) -> RewardOutput:
        return RewardOutput({"a": 3.0, "b": -1.0}, 1.0, item.text)

    assert as_reward(scored, scale=2.0)(rollout("x")) == RewardOutput({"a": 6.0, "b": -2.0}, 1.0, "x")


def test_a_function_of_items_sees_the_whole_group_in_order():
    def longest(items: Sequence[RewardInput]) -> list[float]:
        lengths = [len(item.text) for item in items]
        return [float(length == max(lengths)) for length in lengths]

    reward = as_reward(longest)
    assert reward.needs_whole_group
    assert [o.accuracy for o in reward.score_group([rollout("a"), rollout("abc"), rollout("ab")])] == [0.0, 1.0, 0.0]


def test_completions_and_solutions_give_format_and_accuracy():
    def rows(completions: list[str], solutions: list[str]) -> np.ndarray:
        return np.array([[0.1, float(c == s)] for c, s in zip(completions, solutions)])

    outputs = as_reward(rows).score_group([rollout("2"), rollout("3")])
    assert outputs == [
        RewardOutput({"format": 0.1, "accuracy": 1.0}, 1.0),
        RewardOutput({"format": 0.1, "accuracy": 0.0}, 0.0),
    ]


def test_async_functions_of_one_group_run_at_the_same_time():
    # Each waits until both have begun, so one after the other they would time out.
    begun: list[str] = []

    async def judged(item: RewardInput) -> float:
        begun.append(item.text)
        while len(begun) < 2:
            await asyncio.sleep(0)
        return float(item.text == "2")

    with closing(as_reward(judged)) as reward:
        assert not reward.needs_whole_group
        assert [o.accuracy for o in reward.score_group([rollout("2"), rollout("3")])] == [1.0, 0.0]


def test_an_async_function_of_a_group():
    async def judged(items: Sequence[RewardInput]) -> list[float]:
        return [1.0 for _ in items]

    assert as_reward(judged)(rollout("2")).accuracy == 1.0


def test_an_async_function_that_hangs_is_ended():
    async def hangs(item: RewardInput) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RewardError, match=r"mine:hangs took longer than reward.time_limit_s = 0.05 s"):
        as_reward(hangs, time_limit_s=0.05)(rollout("2"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "expected .*finite number or a RewardOutput, got nan"),
        ("1", "finite number or a RewardOutput, got '1'"),
        (None, "finite number or a RewardOutput, got None"),
        (RewardOutput({"a": float("inf")}, 1.0), "expected a to be a finite number"),
        (RewardOutput({"a": 1.0}, 7.0), r"expected an accuracy in \[0, 1\], got 7.0"),
    ],
)
def test_what_is_no_score_is_an_error(value: object, message: str):
    def scored(item: RewardInput) -> object:
        return value

    with pytest.raises(RewardError, match=message):
        as_reward(scored)(rollout("2"))


@pytest.mark.parametrize("values", [[1.0], 1.0, "1", [1.0, 1.0, 1.0]])
def test_a_group_needs_a_value_a_rollout(values: object):
    def scored(items: Sequence[RewardInput]) -> object:
        return values

    with pytest.raises(RewardError, match=r"mine:scored: expected (2 values|a list)"):
        as_reward(scored).score_group([rollout("2"), rollout("3")])


def test_functions_of_other_parameters_are_refused():
    def scored(text: str, answer: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"expected a function with parameters \(item\), .* got \(text, answer\)"):
        as_reward(scored)
    with pytest.raises(ConfigError, match="expected a function, got int"):
        as_reward(1)  # pyright: ignore[reportArgumentType]


SOURCE = textwrap.dedent(
    '''
    """A reward of the user's own."""

    def brevity(item):
        return 1.0 - item.num_tokens / item.max_new_tokens

    def third(items):
        return [1 / 3 for _ in items]
    '''
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def config(*, allow: Sequence[str] = (), **reward: Any) -> Config:
    raw = {
        "run": {"dir": "r"},
        "model": {"path": "m"},
        "sampling": {"max_new_tokens": 100},
        "reward": {"soft_overlong": False, **reward},
        "generator": {"allow_code": list(allow)},
    }
    return Config.model_validate(raw)


def test_further_rewards_are_added_with_their_weights(source: Path):
    # 10 of 100 tokens: brevity 0.9, times 0.5; the whole form is worth 0.3, times 2.
    whole = "<think>\na\n</think>\n<answer>\n2\n</answer>"
    extra = {"xml_format": 2.0, f"{source}:brevity": 0.5}
    reward = build_reward(config(type="exact", scale=4.0, extra=extra, allow=[str(source)]))
    output = reward(rollout(whole))
    assert output.parts == pytest.approx({"correct": 4.0, "xml_format": 0.6, "brevity": 0.45})
    assert (output.accuracy, output.extracted) == (1.0, "2")
    assert not reward.needs_whole_group


def test_one_reward_of_groups_makes_the_sum_one(source: Path):
    reward = build_reward(config(type="exact", extra={f"{source}:third": 3.0}, allow=[str(source)]))
    assert reward.needs_whole_group
    parts = [output.parts for output in reward.score_group([rollout("2"), rollout("3")])]
    assert parts == [{"correct": 1.0, "third": pytest.approx(1.0)}, {"correct": 0.0, "third": pytest.approx(1.0)}]


def test_overlong_answers_are_punished_after_all_is_summed(source: Path):
    # zero_at_limit takes back everything, the extra rewards too: 1 + 0.25 * 1/3 * 3 - 1.25 = 0.
    extra = {f"{source}:third": 0.75}
    reward = build_reward(config(type="exact", overlong="zero_at_limit", extra=extra, allow=[str(source)]))
    cut = RewardInput("2", {"gt_answer": "2"}, 100, 100, "length")
    assert reward(cut).parts == pytest.approx({"correct": 1.0, "third": 0.25, "overlong": -1.25})


def test_the_tables_name_the_same_rewards():
    assert REWARDS.keys() | our_offers("async_rl.rewards").keys() == REWARD_TYPES.keys()


@pytest.mark.parametrize("extra", [{"xml_format": 0.0}, {"best": 1.0}, {"xml_format": "much"}])
def test_weights_that_make_no_sense_are_refused(extra: dict[str, Any]):
    with pytest.raises(ValueError, match="extra"):
        config(extra=extra)


def test_async_calls_of_many_answers_run_at_once_and_none_waits_for_a_whole_group():
    # Twelve threads score an answer each; each call waits until all twelve have begun.
    begun: list[str] = []

    async def judged(item: RewardInput) -> float:
        begun.append(item.text)
        while len(begun) < 12:
            await asyncio.sleep(0.001)
        return float(item.text == "2")

    reward = as_reward(judged, max_concurrent=12)
    with closing(reward), ThreadPoolExecutor(12) as threads:
        outputs = list(threads.map(reward, [rollout("2" if i % 2 else "3") for i in range(12)]))
    assert [output.accuracy for output in outputs] == [0.0, 1.0] * 6


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


def test_async_calls_share_one_loop_so_that_a_session_can_be_kept():
    loops: set[int] = set()

    async def judged(item: RewardInput) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 1.0

    with closing(as_reward(judged)) as reward:
        for _ in range(3):
            reward(rollout("2"))
    assert len(loops) == 1


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


def test_a_generator_has_a_thread_for_every_async_call(tmp_path: Path):
    path = tmp_path / "judges.py"
    path.write_text("async def judged(item):\n    return 1.0\ndef plain(item):\n    return 1.0\n")
    made = config(type="exact", extra={f"{path}:judged": 1.0}, allow=[str(path)])
    with closing(build_reward(made)) as reward:
        assert grading_threads(made, reward) == MAX_CONCURRENT_CALLS
        assert reward(rollout("2")).parts == {"correct": 1.0, "judged": 1.0}
    made = config(type="exact", extra={f"{path}:plain": 1.0}, allow=[str(path)])
    assert grading_threads(made, build_reward(made)) == 1
