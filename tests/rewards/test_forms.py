"""Reward functions written for TRL and verl, called as those trainers call them."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from async_rl.errors import ConfigError, RewardError
from async_rl.records import TEXT_ROLE, TOOLS_ROLE
from async_rl.rewards.conformance import Example, check_reward
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import UNJUDGED, RewardInput, RewardOutput

CHAT = ({"role": "user", "content": "1+1"},)


def group(*texts: str, messages: Any = CHAT, **data: Any) -> list[RewardInput]:
    data = data or {"solution": "2"}
    return [RewardInput(text, data, 10, 100, "stop", messages, token_ids=[1] * len(text)) for text in texts]


def as_reward(function: Any, **settings: Any) -> FunctionReward:
    return FunctionReward(f"mine:{function.__name__}", function, **{"scale": 1.0, "time_limit_s": 5.0, **settings})


def accuracy(completions: Any, solution: list[str], log_extra: Any = None, **kwargs: Any) -> list[float | None]:
    assert log_extra is None
    contents = [completion[0]["content"] for completion in completions]
    return [None if not known else 2.0 * (text == known) - 1.0 for text, known in zip(contents, solution)]


def test_a_function_of_trl_gets_messages_and_the_columns_as_lists():
    seen: dict[str, Any] = {}

    def f(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, **kwargs)
        return [0.25, -3.0]

    outputs = as_reward(f, scale=2.0).score_group(group("a", "b", answer="2", source="s"))
    assert outputs == [RewardOutput({"f": 0.5}, 0.25), RewardOutput({"f": -6.0}, -3.0)]
    assert seen == {
        "prompts": [list(CHAT)] * 2,
        "completions": [[{"role": "assistant", "content": text}] for text in "ab"],
        "completion_ids": [[1], [1]],
        "answer": ["2", "2"],
        "source": ["s", "s"],
    }


def test_a_function_of_trl_that_reads_only_the_tokens():
    def longer(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    assert [o.accuracy for o in as_reward(longer).score_group(group("a", "bcd"))] == [1.0, 3.0]


def test_with_text_prompts_prompts_and_completions_are_texts():
    def f(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(prompt + text)) for prompt, text in zip(prompts, completions)]

    text = ({"role": TEXT_ROLE, "content": "1+1="},)
    assert [o.accuracy for o in as_reward(f).score_group(group("2", "22", messages=text))] == [5.0, 6.0]


def test_no_reward_of_trl_is_no_part():
    outputs = as_reward(accuracy).score_group(group("2", "3"))
    assert [output.parts for output in outputs] == [{"accuracy": 1.0}, {"accuracy": -1.0}]
    assert as_reward(accuracy).score_group(group("2", solution="")) == [UNJUDGED]


def test_a_renamed_column_goes_by_its_own_name():
    def f(completions: Any, solution: list[str], **kwargs: Any) -> list[float]:
        return [float(solution == ["2"])]

    columns = {"solution": "gt_answer"}
    assert as_reward(f, columns=columns).score_group(group("2", gt_answer="2"))[0].accuracy == 1.0
    with pytest.raises(
        RewardError, match=r"mine:f: expected the rows to have the column 'solution'.*got only gt_answer"
    ):
        as_reward(f).score_group(group("2", gt_answer="2"))


def test_an_async_function_of_trl():
    async def f(completions: Any, **kwargs: Any) -> np.ndarray:
        await asyncio.sleep(0)
        return np.array([1.0, 0.0], np.float32)

    with closing(as_reward(f)) as reward:
        assert [output.accuracy for output in reward.score_group(group("a", "b"))] == [1.0, 0.0]


def test_what_only_trls_trainer_has_is_refused_by_name():
    def f(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        return []

    with pytest.raises(ConfigError, match="can do without trainer_state"):
        as_reward(f)


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
    assert output == RewardOutput({"compute_score": reward}, shown, extracted)
    assert seen == [("gsm8k", "it is 2", "2", {"index": 4})]


def test_a_row_in_verls_own_form_has_its_answer_inside_an_object():
    def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    reward = as_reward(compute_score)
    assert not reward.needs_whole_group
    assert reward(group("2", reward_model={"ground_truth": "2", "style": "rule"})[0]).accuracy == 1.0


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"acc": 1.0}, "a dict with the key score, got a dict with 'acc'"),
        ({"score": "1"}, "expected a finite number"),
        ({"score": 1.0, "acc": 2.0}, r"expected an accuracy in \[0, 1\], got 2.0"),
        (None, "expected a finite number"),
    ],
)
def test_what_a_function_of_verl_must_not_return(returned: Any, told: str):
    def compute_score(solution_str: str, ground_truth: str) -> Any:
        return returned

    with pytest.raises(RewardError, match=told):
        as_reward(compute_score)(group("2")[0])


def test_a_list_of_numbers_is_enough_for_completions_and_solutions():
    def f(completions: list[str], solutions: list[str]) -> list[float]:
        return [1.0, 0.5]

    assert [o.parts for o in as_reward(f).score_group(group("a", "b", gt_answer="a"))] == [{"f": 1.0}, {"f": 0.5}]


def test_completions_and_solutions_with_further_arguments_are_trls_form():
    def f(completions: Any, solutions: Any, **kwargs: Any) -> list[float]:
        return [float(one[0]["content"] == gold) for one, gold in zip(completions, solutions, strict=True)]

    outputs = as_reward(f).score_group(group("2", "3", solutions="2", gt_answer="other"))
    assert [output.accuracy for output in outputs] == [1.0, 0.0]


def test_schemas_of_tools_are_no_message_of_trls_prompts():
    def f(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        assert prompts == [list(CHAT)]
        return [1.0]

    tools = {"role": TOOLS_ROLE, "content": '[{"name": "f", "parameters": {}}]'}
    assert as_reward(f).score_group(group("2", messages=(tools, *CHAT)))[0].accuracy == 1.0


def test_a_function_of_verl_that_needs_more_than_verl_gives_is_refused_at_the_start():
    def compute_score(solution_str: str, ground_truth: str, tokenizer: Any, **kwargs: Any) -> float:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"expected a function with parameters .* got \(solution_str, .*tokenizer\)"):
        as_reward(compute_score)


def test_a_timeout_of_the_functions_own_is_not_taken_for_the_time_limit():
    def plain(item: RewardInput) -> float:
        raise TimeoutError("the judge's host does not answer")

    async def waiting(item: RewardInput) -> float:
        raise TimeoutError("the judge's host does not answer")

    for function in (plain, waiting):
        with closing(as_reward(function)) as reward, pytest.raises(TimeoutError, match="host does not answer"):
            reward.score_group(group("2"))


def test_the_checks_of_a_reward_name_a_timeout_of_its_own_as_its_error():
    def answered_late(item: RewardInput) -> float:
        raise TimeoutError("the judge's host does not answer")

    problems = check_reward(as_reward(answered_late), Example({"solution": "2"}, "2", "3"), time_limit_s=5.0)
    assert "got TimeoutError: the judge's host does not answer" in problems[0]
