"""End to end on real rows: scripted answers, right and wrong, to rewards, groups and advantages."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.config.loading import parse_config
from async_rl.data.dataset import RowRules, load_rows
from async_rl.records import Prompt
from async_rl.rewards.records import Reward
from async_rl.rewards.registry import build_reward
from tests.extensions.code_rewards.code_answers import CODE_CONTESTS, MBPP
from tests.rewards.scripted import sampled_group, signs_of_advantages

DATA = Path(__file__).resolve().parents[2] / "data"
ROWS = [
    (file, index, *programs)
    for file, answers in (("code_contests_6.jsonl", CODE_CONTESTS), ("mbpp_10.jsonl", MBPP))
    for index, programs in enumerate(answers)
    if programs is not None
]


@pytest.fixture(scope="module")
def reward() -> Iterator[Reward]:
    section = {"type": "code", "soft_overlong": False, "code": {"time_limit_s": 30.0, "total_time_limit_s": 100.0}}
    raw = {"run": {"dir": "run"}, "model": {"path": "m"}, "reward": section}
    with closing(build_reward(parse_config(raw, "the test"))) as built:
        yield built


@pytest.mark.parametrize(("file", "index", "right", "wrong"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_right_programs_are_paid_and_pushed_up_and_wrong_ones_down(
    reward: Reward, file: str, index: int, right: str, wrong: str
):
    row = load_rows(str(DATA / file), rules=RowRules(needs=("test_cases",))).rows[index]
    prompt = Prompt(index, index, 0, row.messages, row.reward_data)
    texts = [
        f"I count.\n```python\n{right}\n```\nThat is it.",
        f"```python\n{wrong}\n```",
        f"First I thought\n```python\n{wrong}\n```\nbut no:\n```python\n{right}\n```",
        right,  # right, but in no fence
        "I don't know.",
    ]
    group = sampled_group(reward, prompt, texts)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [rollout.accuracy for rollout in group.rollouts] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert signs_of_advantages(group, prompt) == [1, -1, 1, -1, -1]
