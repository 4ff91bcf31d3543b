"""End to end on real rows: scripted answers to GSM8K, right and wrong, to rewards, groups and advantages."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import parse_config
from async_rl.data.dataset import RowRules, load_rows
from async_rl.records import Prompt
from async_rl.rewards.registry import build_reward
from tests.rewards.scripted import sampled_group, signs_of_advantages

ROWS = load_rows(
    str(Path(__file__).resolve().parents[1] / "data" / "gsm8k_test_32.jsonl"), rules=RowRules(needs=("gt_answer",))
).rows[:4]

WHOLE = "<think>\none\ntwo\n</think>\n<answer>\n{}\n</answer>"

Scripted = Sequence[tuple[str, float, float, int]]
"""Answers with ``RIGHT`` or ``WRONG`` in them; the reward, the accuracy and the sign of the advantage of each."""

BOXED: Scripted = [
    (r"So it is \boxed{RIGHT}.", 1.0, 1.0, 1),
    (r"So it is \boxed{WRONG}.", 0.0, 0.0, -1),
    (r"First \boxed{WRONG}, no: \boxed{\text{RIGHT}}", 1.0, 1.0, 1),
    (r"First \boxed{RIGHT}, no: \boxed{WRONG}", 0.0, 0.0, -1),
    ("It is RIGHT.", 0.0, 0.0, -1),
]
TAGS: Scripted = [
    ("<think>Easy.</think><answer>RIGHT</answer>", 1.0, 1.0, 1),
    ("<think>Easy.</think><answer>WRONG</answer>", 0.0, 0.0, -1),
    ("<answer>RIGHT</answer>", 0.0, 1.0, -1),  # right, in a wrong structure
    ("RIGHT", 0.0, 0.0, -1),
]
EXACT: Scripted = [
    ("<answer> RIGHT </answer>", 1.0, 1.0, 1),
    ("<answer>WRONG</answer>", 0.0, 0.0, -1),
    (" RIGHT\n", 1.0, 1.0, 1),
    ("<answer>RIGHT.0</answer>", 0.0, 0.0, -1),
]
# The whole form has 0.3 points: 0.1 for its order, 0.05 for each tag on a line of its own.
EXACT_AND_FORM: Scripted = [
    (WHOLE.format("RIGHT"), 1.3, 1.0, 1),
    (WHOLE.format("WRONG"), 0.3, 0.0, -1),
    ("RIGHT", 1.0, 1.0, 1),
    ("WRONG", 0.0, 0.0, -1),
]


@pytest.mark.parametrize("row", range(len(ROWS)))
@pytest.mark.parametrize(
    ("section", "scripted"),
    [
        ({"type": "boxed"}, BOXED),
        ({"type": "think_answer_tags"}, TAGS),
        ({"type": "exact"}, EXACT),
        ({"type": "exact", "extra": {"xml_format": 1.0}}, EXACT_AND_FORM),
    ],
    ids=["boxed", "think_answer_tags", "exact", "exact and form"],
)
def test_right_answers_are_paid_and_pushed_up_and_wrong_ones_down(
    row: int, section: Mapping[str, Any], scripted: Scripted
):
    raw = {"run": {"dir": "run"}, "model": {"path": "m"}, "reward": {**section, "soft_overlong": False}}
    prompt = Prompt(row, row, 0, ROWS[row].messages, ROWS[row].reward_data)
    right = str(prompt.reward_data["gt_answer"])
    texts = [text.replace("RIGHT", right).replace("WRONG", str(int(right) + 1)) for text, *_ in scripted]
    with closing(build_reward(parse_config(raw, "the test"))) as reward:
        group = sampled_group(reward, prompt, texts)
    assert [rollout.reward for rollout in group.rollouts] == pytest.approx([paid for _, paid, _, _ in scripted])
    assert [rollout.accuracy for rollout in group.rollouts] == [accuracy for _, _, accuracy, _ in scripted]
    assert signs_of_advantages(group, prompt) == [sign for *_, sign in scripted]
