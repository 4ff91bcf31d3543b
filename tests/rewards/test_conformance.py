"""Every built-in reward, and every form of a user's function, passes the conformance suite; bad ones don't."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from typing import Any

import pytest

from async_rl.config.reward import REWARD_TYPES
from async_rl.rewards.conformance import Example, check_reward, example_of, main
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import build_reward
from tests.config.made import a_config

CODE_TESTS = {"test_cases": {"inputs": ["1\n"], "outputs": ["2\n"]}}
BY_HAND: dict[str, Example] = {
    "boxed": Example({"gt_answer": "42"}, "so \\boxed{42.0}", "so \\boxed{43}", ("gt_answer",)),
    "none": Example({}),
    "code": Example(CODE_TESTS, "```python\nprint(int(input()) + 1)\n```", "```python\nprint(1)\n```", ("test_cases",)),
}


@pytest.mark.parametrize(
    "name", [name for name, kind in REWARD_TYPES.items() if not (kind.asks_scorer or kind.asks_judge)]
)
def test_every_built_in_reward_conforms(name: str):
    raw = {
        "sampling": {"max_new_tokens": 100},
        "reward": {"type": name, "time_limit_s": 1.0, "code": {"time_limit_s": 1.0, "packages": []}},
    }
    if name == "none":
        teacher = {"model": "t", "address": "tcp://127.0.0.1:5571"}
        raw |= {"scorer": {"t": teacher}, "distill": {"teacher": "t"}, "queue": {"filter_range": []}}
    with closing(build_reward(a_config(**raw))) as reward:
        assert check_reward(reward, BY_HAND.get(name) or example_of(REWARD_TYPES[name], {"gt_answer": "42"})) == []


def of_item(item: RewardInput) -> float:
    return float(item.text == item.reward_data["gt_answer"])


EXAMPLE = Example({"gt_answer": "42"}, "42", "43")


def problems_of(function: Callable[..., Any], example: Example = EXAMPLE, time_limit_s: float = 30.0) -> list[str]:
    with closing(FunctionReward("mine:f", function, scale=2.0, time_limit_s=5.0)) as reward:
        return check_reward(reward, example, time_limit_s=time_limit_s)


def test_what_is_wrong_with_a_reward_is_said():
    calls = count()

    def counts(item: RewardInput) -> RewardOutput:
        return RewardOutput({"f": float(next(calls))}, 1.0)

    assert "text 'empty': expected the same output twice" in problems_of(counts)[0]
    assert "expected accuracy below 1, got 1.0" in "\n".join(problems_of(counts))
    assert problems_of(lambda item: 0.0) == ["the right answer: expected accuracy 1, got 0.0"]
    assert "text 'empty': expected an output, got IndexError" in problems_of(lambda item: float(item.text[0] == "4"))[0]
    assert "finite number" in problems_of(lambda item: float("nan"))[0]


def test_a_row_that_lacks_a_field_must_be_refused_as_such():
    example = Example({"gt_answer": "42"}, "42", "43", row_fields=("gt_answer",))
    assert "row without gt_answer: expected RewardError, got KeyError" in problems_of(of_item, example)[0]


def test_a_group_of_several_must_get_what_each_gets_alone():
    class Careless:
        is_async = needs_whole_group = False

        def __call__(self, item: RewardInput) -> RewardOutput:
            return RewardOutput({"f": 0.0}, of_item(item))

        def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
            return [RewardOutput({"f": float(len(items))}, 0.0) for _ in items]

        def counters(self) -> dict[str, int]:
            return {"bad": -1}

        def close(self) -> None: ...

    found = "\n".join(check_reward(Careless(), EXAMPLE))
    assert "expected the same output in a group as alone" in found
    assert "counter 'bad': expected a count of at least 0, got -1" in found


def test_a_reward_that_hangs_is_left_at_the_limit():
    def hangs(item: RewardInput) -> float:
        time.sleep(5.0 if item.text else 0.0)
        return 0.0

    assert problems_of(hangs, time_limit_s=0.2) == ["text 'blank': expected an output within 0.2 s, got none"]


def test_the_command_line_checks_a_function_of_the_users_own(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def f(item):\n    return float(item.text.split()[-1:] == [item.reward_data['gt_answer']])\n")
    monkeypatch.setattr("sys.argv", ["conformance", f"{path}:f", '{"gt_answer": "42"}', "it is 42"])
    assert main() == 0
    assert "conforms" in capsys.readouterr().out
    known = "item.reward_data['gt_answer']"
    for name, loose in (("in", "{} in item.text"), ("end", "item.text.endswith({})")):
        path = tmp_path / f"{name}.py"
        path.write_text(f"def f(item):\n    return float({loose.format(known)})\n")
        monkeypatch.setattr("sys.argv", ["conformance", f"{path}:f", '{"gt_answer": "42"}', "it is 42"])
        assert main() == 1
        assert "the wrong answer 'it is 1542': expected accuracy below 1, got 1.0" in capsys.readouterr().out
    path = tmp_path / "bad.py"
    path.write_text("def g(item):\n    return 'two'\n")
    monkeypatch.setattr("sys.argv", ["conformance", f"{path}:g", "{}"])
    assert main() == 1
    assert "expected a finite number or a RewardOutput, got 'two'" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["conformance", "best", "{}"])
    assert main() == 2
    assert "expected boxed, think_answer_tags, exact" in capsys.readouterr().err
