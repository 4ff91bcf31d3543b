"""The built-in rewards of answers, from config to parts and accuracy."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import build_reward
from tests.config.made import a_config

ROOT = Path(__file__).resolve().parents[2]
BOXED, TAGS, EXACT = ({"type": name} for name in ("boxed", "think_answer_tags", "exact"))
PLAIN = {"soft_overlong": False}


def score(
    reward: dict[str, Any], text: str, num_tokens: int = 10, gold: object = "72", opened: str = "", is_cut: bool = False
) -> RewardOutput:
    """The output for an answer of at most 100 tokens. The cache is then 100 // 4 = 25 tokens long."""
    finish_reason = "length" if is_cut else "stop"
    with closing(build_reward(a_config(reward=reward, sampling={"max_new_tokens": 100}))) as made:
        item = RewardInput(text, {"gt_answer": gold}, num_tokens, 100, finish_reason, prompt_opened=opened)  # pyright: ignore[reportArgumentType]
        return made(item)


@pytest.mark.parametrize(
    ("reward", "text", "correct", "accuracy"),
    [
        ({**BOXED, "scale": 10.0}, r"so \boxed{72}", 10.0, 1.0),
        (BOXED, r"so \boxed{73}", 0.0, 0.0),
        (BOXED, r"First \boxed{73}, no: \boxed{\text{72}}", 1.0, 1.0),
        (BOXED, r"First \boxed{72}, no: \boxed{73}", 0.0, 0.0),
        (BOXED, "72", 0.0, 0.0),
        ({**BOXED, "equality": "exact"}, r"\boxed{72}", 1.0, 1.0),
        ({**BOXED, "equality": "exact"}, r"\boxed{72.0}", 0.0, 0.0),
        (TAGS, "<think>a</think><answer>72</answer>", 1.0, 1.0),
        (TAGS, "<think>a</think><answer>73</answer>", 0.0, 0.0),
        (TAGS, "<answer>72</answer>", 0.0, 1.0),  # right, in a wrong structure
        ({**TAGS, "require_format": False}, "<answer>72</answer>", 1.0, 1.0),
        (EXACT, "<answer> 72 </answer> or so", 1.0, 1.0),
        (EXACT, " 72\n", 1.0, 1.0),
        (EXACT, "<answer>72.0</answer>", 0.0, 0.0),
        (EXACT, "so 72", 0.0, 0.0),
    ],
    ids=str,
)
def test_a_right_answer_in_its_form_earns_the_scale(reward: dict[str, Any], text: str, correct: float, accuracy: float):
    output = score(reward | PLAIN, text)
    assert (output.parts, output.accuracy) == ({"correct": correct}, accuracy)


def test_the_format_alone_may_earn():
    reward = {**TAGS, **PLAIN, "scale": 10.0, "format": 0.5}
    assert score(reward, "<think>a</think><answer>73</answer>").parts == {"correct": 0.0, "format": 0.5}
    assert score(reward, "<answer>72</answer>").parts == {"correct": 0.0, "format": 0.0}
    assert score(reward, "<think>a</think><answer>72</answer>").parts == {"correct": 10.0, "format": 0.5}


@pytest.mark.parametrize(
    ("reward", "text", "num_tokens", "is_cut", "correct", "overlong"),
    [
        # 80 tokens cost (75 - 80) / 25 = -0.2 of the scale, 100 all of it. With a cache of 50, 75 cost (50 - 75) / 50.
        ({}, r"\boxed{72}", 75, False, 1.0, 0.0),
        ({}, r"\boxed{72}", 76, False, 1.0, -0.04),
        ({}, r"\boxed{72}", 99, False, 1.0, -0.96),
        ({}, r"\boxed{72}", 101, False, 1.0, -1.0),
        ({"scale": 10.0}, r"\boxed{72}", 10, False, 10.0, 0.0),
        ({"scale": 10.0}, r"\boxed{72}", 80, False, 10.0, -2.0),
        ({"scale": 10.0}, r"\boxed{72}", 100, False, 10.0, -10.0),
        ({"scale": 10.0}, "...", 100, False, 0.0, -10.0),
        ({"cache_length": 50}, "", 75, False, 0.0, -0.5),
        # The variant takes what a cut answer earned and no more; its line is for texts with an answer.
        ({"scale": 10.0, "overlong": "zero_at_limit"}, r"\boxed{72}", 80, False, 10.0, -2.0),
        ({"scale": 10.0, "overlong": "zero_at_limit"}, r"\boxed{73}", 80, False, 0.0, -2.0),
        ({"scale": 10.0, "overlong": "zero_at_limit"}, "...", 80, False, 0.0, 0.0),
        ({"scale": 10.0, "overlong": "zero_at_limit"}, r"\boxed{72}", 100, False, 10.0, -10.0),
        ({"scale": 10.0, "overlong": "zero_at_limit"}, "...", 100, False, 0.0, 0.0),
        ({"scale": 10.0, "overlong": "zero_at_limit"}, r"\boxed{72}", 50, True, 10.0, -10.0),
        ({"scale": 10.0}, r"\boxed{72}", 50, True, 10.0, -10.0),
        ({"overlong": "zero_at_limit", **PLAIN}, r"\boxed{72}", 99, False, 1.0, 0.0),
        ({"overlong": "zero_at_limit", **PLAIN}, r"\boxed{72}", 100, False, 1.0, -1.0),
    ],
    ids=str,
)
def test_long_answers_lose_a_part_of_the_scale_and_no_accuracy(
    reward: dict[str, Any], text: str, num_tokens: int, is_cut: bool, correct: float, overlong: float
):
    output = score(reward, text, num_tokens, is_cut=is_cut)
    assert output.parts == pytest.approx({"correct": correct, "overlong": overlong})
    assert output.accuracy == float("72" in text)


NOTHING_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("text", "opened", "correct", "points"),
    [
        # xml_format: 0.1 for the order, 0.05 for each tag on a line of its own.
        ("2 and 2\n</think>\n<answer>\n72\n</answer>", "<think>\n", 1.0, 0.3),
        ("2 and 2\n</think>\n<answer>\n72\n</answer>", "", 0.0, 0.15),  # nobody has opened the thoughts
        ("2 and 2\n<answer>\n72\n</answer>", "<think>\n", 0.0, 0.15),  # and nobody has closed them
        ("<answer>\n72\n</answer>", NOTHING_THOUGHT, 1.0, 0.3),
        ("<think>\n2\n</think>\n<answer>\n72\n</answer>", NOTHING_THOUGHT, 1.0, 0.3),  # the whole form by itself
        ("<think>\n2\n</think>\n<answer>\n72\n</answer>", "<think>\n", 1.0, 0.3),
    ],
)
def test_what_the_prompt_has_opened_counts_for_the_format(text: str, opened: str, correct: float, points: float):
    assert score(TAGS | PLAIN, text, opened=opened).parts == {"correct": correct}
    output = score({"type": "xml_format", **PLAIN}, text, opened=opened)
    assert output.parts["xml_format"] == pytest.approx(points)
    assert output.accuracy == float(points == 0.3)


def test_rewards_and_data_import_no_sympy():
    # The generator's worker starts fast; sympy lives in the child alone.
    program = "import sys, async_rl.data.dataset, async_rl.rewards.registry\nprint('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
