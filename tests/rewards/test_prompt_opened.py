"""What the prompt has opened for an answer counts in the built-in rewards, and the user's own functions get it."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config.loading import parse_config
from async_rl.rewards.answers import XmlFormatReward
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import build_reward

NOTHING_THOUGHT = "<think>\n\n</think>\n\n"


def rollout(text: str, opened: str) -> RewardInput:
    return RewardInput(text, {"gt_answer": "4"}, 10, 100, "stop", prompt_opened=opened)


@pytest.mark.parametrize(
    ("text", "opened", "correct"),
    [
        ("2 and 2\n</think>\n<answer>4</answer>", "<think>\n", 1.0),
        ("2 and 2\n</think>\n<answer>5</answer>", "<think>\n", 0.0),
        ("2 and 2\n</think>\n<answer>4</answer>", "", 0.0),  # nobody has opened the thoughts
        ("2 and 2\n<answer>4</answer>", "<think>\n", 0.0),  # and nobody has closed them
        ("<answer>4</answer>", NOTHING_THOUGHT, 1.0),
        ("<think>2 and 2</think>\n<answer>4</answer>", NOTHING_THOUGHT, 1.0),  # the whole form by itself
        ("<think>2 and 2</think>\n<answer>4</answer>", "<think>\n", 1.0),
        ("4</answer>", "<think>\n</think>\n<answer>", 1.0),
    ],
)
def test_the_format_of_think_answer_tags_counts_what_the_prompt_has_opened(text: str, opened: str, correct: float):
    raw = {"run": {"dir": "x"}, "model": {"path": "m"}, "reward": {"type": "think_answer_tags"}}
    reward = build_reward(parse_config(raw, "test"))
    assert reward(rollout(text, opened)).parts["correct"] == correct
    reward.close()


@pytest.mark.parametrize(
    ("text", "opened", "points"),
    [
        ("2 and 2\n</think>\n<answer>\n4\n</answer>", "<think>\n", 0.3),
        ("2 and 2\n</think>\n<answer>\n4\n</answer>", "", 0.15),  # three tags of four, at 0.05
        ("<answer>\n4\n</answer>", NOTHING_THOUGHT, 0.3),
        ("<think>\n2\n</think>\n<answer>\n4\n</answer>", "<think>\n", 0.3),
    ],
)
def test_xml_format_counts_what_the_prompt_has_opened(text: str, opened: str, points: float):
    output = XmlFormatReward(scale=1.0)(rollout(text, opened))
    assert output.parts["xml_format"] == pytest.approx(points)
    assert output.accuracy == float(points == 0.3)


def test_an_own_function_gets_the_sampled_text_and_what_the_prompt_has_opened():
    seen: list[Any] = []

    def of_trl(completions: Any, prompt_opened: list[str], **kwargs: Any) -> list[float]:
        seen.extend([completions[0][0]["content"], prompt_opened])
        return [0.5]

    FunctionReward("mine:f", of_trl, scale=1.0, time_limit_s=5.0)(rollout("4", "<think>\n"))
    assert seen == ["4", ["<think>\n"]]
