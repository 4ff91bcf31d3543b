"""Every form of a user's function: our own, and those written for TRL and verl, called as those trainers call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from async_rl.errors import ConfigError, RewardError
from async_rl.records import TEXT_ROLE, TOOLS_ROLE
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import UNJUDGED, RewardInput, RewardOutput

CHAT = ({"role": "user", "content": "1+1"},)
TEXT = ({"role": TEXT_ROLE, "content": "1+1="},)
TOOLS = {"role": TOOLS_ROLE, "content": '[{"name": "f", "parameters": {}}]'}


def group(*texts: str, messages: Any = CHAT, **data: Any) -> list[RewardInput]:
    data = data or {"gt_answer": "2"}
    return [RewardInput(text, data, 10, 100, "stop", messages, token_ids=[1] * len(text)) for text in texts]


def as_reward(function: Callable[..., Any], **settings: Any) -> FunctionReward:
    return FunctionReward("mine:f", function, **{"scale": 1.0, "time_limit_s": 5.0, **settings})


def half(item: RewardInput) -> float:
    return 0.5 if item.text else 0.0


def points(item: RewardInput) -> float:
    return float(item.text)


def right(item: RewardInput) -> bool:
    return item.text == item.reward_data["gt_answer"]


def parts(item: RewardInput) -> RewardOutput:
    return RewardOutput({"a": 3.0, "b": -1.0}, 1.0, item.text)


def longest(items: Sequence[RewardInput]) -> list[float]:
    lengths = [len(item.text) for item in items]
    return [float(length == max(lengths)) for length in lengths]


async def awaited(items: Sequence[RewardInput]) -> list[float]:
    await asyncio.sleep(0)
    return [1.0 for _ in items]


def rows(completions: list[str], solutions: list[str]) -> np.ndarray:
    return np.array([[0.1, float(c == s)] for c, s in zip(completions, solutions)])


def of_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def with_solutions(completions: Any, solutions: Any, **kwargs: Any) -> list[float]:
    return [float(one[0]["content"] == gold) for one, gold in zip(completions, solutions, strict=True)]


def of_texts(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(prompt + text)) for prompt, text in zip(prompts, completions)]


def or_none(completions: Any, gt_answer: list[str], log_extra: Any = None, **kwargs: Any) -> list[float | None]:
    assert log_extra is None
    return [None if one[0]["content"] == "?" else -1.0 for one in completions]


def of_messages(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [float(prompt == list(CHAT)) for prompt in prompts]


def of_verl(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def outputs(name: str, *values: float) -> list[RewardOutput]:
    return [RewardOutput({name: value}, value) for value in values]


@pytest.mark.parametrize(
    ("function", "items", "expected"),
    [
        (half, group("a", ""), outputs("f", 0.5, 0.0)),
        (points, group("-3"), outputs("f", -3.0)),  # a reward without an accuracy
        (right, group("2", "3"), outputs("f", 1.0, 0.0)),
        (parts, group("x"), [RewardOutput({"a": 3.0, "b": -1.0}, 1.0, "x")]),
        (longest, group("a", "abc"), outputs("f", 0.0, 1.0)),
        (awaited, group("2"), outputs("f", 1.0)),
        (rows, group("2", "3"), [RewardOutput({"format": 0.1, "accuracy": a}, a) for a in (1.0, 0.0)]),
        (of_tokens, group("a", "bcd"), outputs("f", 1.0, 3.0)),
        (with_solutions, group("2", "3", solutions="2", gt_answer="other"), outputs("f", 1.0, 0.0)),
        (of_texts, group("2", "22", messages=TEXT), outputs("f", 5.0, 6.0)),
        (or_none, group("2", "?"), [*outputs("f", -1.0), UNJUDGED]),
        (of_messages, group("2", messages=(TOOLS, *CHAT)), outputs("f", 1.0)),
        (of_verl, group("2", reward_model={"ground_truth": "2", "style": "rule"}), outputs("f", 1.0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_gets_what_it_asks_for_and_gives_reward_and_accuracy(
    function: Callable[..., Any], items: list[RewardInput], expected: list[RewardOutput]
):
    with closing(as_reward(function)) as reward:
        assert reward.score_group(items) == expected
        if not reward.needs_whole_group:
            assert [reward(item) for item in items] == expected
    with closing(as_reward(function, scale=2.0)) as reward:  # of the reward, not of the accuracy
        scaled = [RewardOutput({k: 2.0 * v for k, v in o.parts.items()}, o.accuracy, o.extracted) for o in expected]
        assert reward.score_group(items) == [UNJUDGED if o is UNJUDGED else s for o, s in zip(expected, scaled)]


def test_a_function_of_trl_gets_messages_and_the_columns_as_lists():
    seen: dict[str, Any] = {}

    def f(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, **kwargs)
        return [0.25, -3.0]

    as_reward(f).score_group(group("a", "b", answer="2", source="s"))
    assert seen == {
        "prompts": [list(CHAT)] * 2,
        "completions": [[{"role": "assistant", "content": text}] for text in "ab"],
        "completion_ids": [[1], [1]],
        "answer": ["2", "2"],
        "source": ["s", "s"],
    }


def test_a_renamed_column_goes_by_its_own_name():
    def f(completions: Any, solution: list[str], **kwargs: Any) -> list[float]:
        return [float(solution == ["2"])]

    assert as_reward(f, columns={"solution": "gt_answer"}).score_group(group("2"))[0].accuracy == 1.0
    with pytest.raises(RewardError, match=r"expected the rows to have the column 'solution'.*got only gt_answer"):
        as_reward(f).score_group(group("2"))


@pytest.mark.parametrize(
    ("returned", "reward", "shown", "extracted"),
    [
        (-1.0, -1.0, -1.0, None),
        (np.float32(0.5), 0.5, 0.5, None),
        ({"score": -1.0, "acc": False, "pred": "7"}, -1.0, 0.0, "7"),
        ({"score": 1.5, "acc": np.bool_(True)}, 1.5, 1.0, None),
        ({"score": 3}, 3.0, 3.0, None),
        ((2.0, 1.0), 2.0, 1.0, None),
    ],
)
def test_a_function_of_verl_returns_a_number_or_a_dict(returned: Any, reward: float, shown: float, extracted: Any):
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return returned

    data = {"data_source": "gsm8k", "gt_answer": "2", "extra_info": {"index": 4}}
    (output,) = as_reward(compute_score).score_group(group("it is 2", **data))
    assert output == RewardOutput({"f": reward}, shown, extracted)
    assert seen == [("gsm8k", "it is 2", "2", {"index": 4})]


@pytest.mark.parametrize(
    ("form", "returned", "told"),
    [
        ("own", float("nan"), "finite number or a RewardOutput, got nan"),
        ("own", RewardOutput({"a": float("inf")}, 1.0), "expected a to be a finite number"),
        ("own", RewardOutput({"a": 1.0}, 7.0), r"an accuracy in \[0, 1\], got 7.0"),
        ("verl", {"acc": 1.0}, "a dict with the key score, got a dict with 'acc'"),
        ("verl", {"score": "1"}, "expected a finite number"),
        ("verl", {"score": 1.0, "acc": 2.0}, r"an accuracy in \[0, 1\], got 2.0"),
        ("verl", None, "expected a finite number"),
        ("group", [1.0], "a list of 2 values"),
        ("group", "1", "expected a list"),
        ("group", [1.0, 1.0, 1.0], "a list of 2 values"),
    ],
)
def test_what_is_no_score_is_an_error(form: str, returned: Any, told: str):
    functions: dict[str, Callable[..., Any]] = {
        "own": lambda item: returned,
        "verl": lambda solution_str, ground_truth: returned,
        "group": lambda items: returned,
    }
    with pytest.raises(RewardError, match=told):
        as_reward(functions[form]).score_group(group("2", "3"))


def of_other_names(text: str, answer: str) -> float:
    raise AssertionError


def of_trainer(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
    raise AssertionError


def of_tokenizer(solution_str: str, ground_truth: str, tokenizer: Any, **kwargs: Any) -> float:
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (of_other_names, r"expected a function with parameters \(item\), .* got \(text, answer\)"),
        (of_trainer, "can do without trainer_state"),
        (of_tokenizer, r"expected a function with parameters .* got \(solution_str, .*tokenizer\)"),
        (1, "expected a function, got int"),
    ],
)
def test_functions_of_other_parameters_are_refused_at_the_start(function: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        as_reward(function)


def test_a_timeout_of_the_functions_own_is_not_taken_for_the_time_limit():
    def plain(item: RewardInput) -> float:
        raise TimeoutError("the judge's host does not answer")

    async def waiting(item: RewardInput) -> float:
        raise TimeoutError("the judge's host does not answer")

    for function in (plain, waiting):
        with closing(as_reward(function)) as reward, pytest.raises(TimeoutError, match="host does not answer"):
            reward.score_group(group("2"))
