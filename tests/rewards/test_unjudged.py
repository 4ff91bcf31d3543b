"""A reward that returns None says nothing of an answer: no reward, no advantage, no part in the baseline."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.config.loss import LossConfig
from async_rl.learner.data.batch import prepare_batch
from async_rl.learner.losses.advantages import with_advantages
from async_rl.net.codec import encode_group
from async_rl.queue.core.groups import GroupSummary, read_summary
from async_rl.queue.messages import TakenGroup
from async_rl.records import Prompt
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import UNJUDGED, RewardInput, RewardOutput
from async_rl.rewards.registry import NoReward, RewardSum, build_reward
from tests.launch.checks.made import made
from tests.rewards.scripted import sampled_group

TASKS = """
def _of(task, completions, kinds, known):
    return [float(c[0]["content"] == a) if k == task else None for c, k, a in zip(completions, kinds, known)]


def maths(completions, task, gt_answer, **kwargs):
    return _of("maths", completions, task, gt_answer)


def coding(completions, task, gt_answer, **kwargs):
    return _of("coding", completions, task, gt_answer)


def brevity(completions, **kwargs):
    return [-len(c[0]["content"]) for c in completions]


def polite(completions, **kwargs):
    return [float("please" in c[0]["content"]) for c in completions]
"""
"""The recipe of TRL's documentation for several tasks: each function judges the rows of its own."""


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "tasks.py").write_text(TASKS)
    return f"{tmp_path}/tasks.py"


def config_of(code: str, main: str, extra: dict[str, float], **reward: Any) -> Config:
    raw = {
        "run": {"dir": "r"}, "model": {"path": "m"}, "generator": {"allow_code": [code]}, "queue": {"filter_range": []},
        "reward": {
            "type": main if main == "none" else f"{code}:{main}", "soft_overlong": False,
            "extra": {f"{code}:{name}": weight for name, weight in extra.items()}, **reward,
        },
    }  # fmt: skip
    return parse_config(raw, "test")


def score(config: Config, text: str, task: str) -> RewardOutput:
    with closing(build_reward(config)) as reward:
        return reward(
            RewardInput(text, {"gt_answer": "4", "task": task}, 2, 8, "stop", [{"role": "user", "content": ""}])
        )


def test_each_task_is_judged_by_its_own_function(code: str):
    config = config_of(code, "maths", {"coding": 2.0})
    assert score(config, "4", "maths") == RewardOutput({"maths": 1.0}, 1.0)
    assert score(config, "4", "coding") == RewardOutput({"coding": 2.0}, 1.0)
    assert score(config, "5", "coding") == RewardOutput({"coding": 0.0}, 0.0)
    assert score(config, "4", "poetry") == UNJUDGED


@pytest.mark.parametrize(
    ("extra", "accuracy"),
    [
        ({"coding": 1.0, "polite": 1.0}, 0.5),  # the mean of 1 and 0
        ({"coding": 1.0, "brevity": 1.0}, -1.0),  # a reward, which is no accuracy: the filter compares rewards
    ],
)
def test_the_accuracy_is_that_of_the_functions_that_judge(code: str, extra: dict[str, float], accuracy: float):
    assert score(config_of(code, "maths", extra), "4", "coding").accuracy == accuracy


def test_an_accuracy_that_is_named_stays(code: str):
    config = config_of(code, "maths", {"coding": 1.0, "polite": 1.0}, accuracy=f"{code}:coding")
    assert score(config, "4", "coding") == RewardOutput({"coding": 1.0, "polite": 0.0}, 1.0)


def test_none_as_the_main_reward_judges_every_answer_unless_functions_are_added(code: str):
    alone = RewardSum(NoReward(), scale=1.0, overlong=None)  # of a run that learns from a teacher
    assert alone(RewardInput("4", {}, 2, 8, "stop")) == RewardOutput({}, 0.0)
    assert score(config_of(code, "none", {"maths": 1.0}), "4", "poetry") == UNJUDGED
    assert score(config_of(code, "none", {"maths": 1.0}), "4", "maths") == RewardOutput({"maths": 1.0}, 0.0)


def summary(config: Config, task: str, texts: list[str]) -> GroupSummary:
    prompt = Prompt(0, 0, 0, ({"role": "user", "content": "?"},), {"gt_answer": "4", "task": task})
    with closing(build_reward(config)) as reward:
        return read_summary(encode_group(sampled_group(reward, prompt, texts)))


def test_groups_of_the_second_task_are_as_accurate_as_their_answers(code: str):
    config = config_of(code, "maths", {"coding": 1.0})
    for task in ("maths", "coding"):
        found = summary(config, task, ["4", "5", "4", "5"])
        assert (found.accuracy, found.num_graded, found.rewards_vary, found.unfit) == (2.0, 4, True, "")


def test_an_answer_without_a_verdict_gets_no_advantage_and_counts_in_no_baseline():
    def known(completions: Any, **kwargs: Any) -> list[float | None]:
        return [{"right": 1.0, "wrong": 0.0}.get(one[0]["content"]) for one in completions]

    prompt = Prompt(0, 0, 0, ({"role": "user", "content": "?"},), {"gt_answer": "4"})
    reward = FunctionReward("mine:known", known, scale=1.0, time_limit_s=5.0)
    group = sampled_group(reward, prompt, ["right", "who knows", "wrong", "hm"])
    assert [one.finish_reason for one in group.rollouts] == ["stop", "unjudged", "stop", "unjudged"]
    found = read_summary(encode_group(group))
    assert (found.accuracy, found.num_graded, found.unfit) == (1.0, 2, "")
    taken = TakenGroup(group, prompt, 0.0, 5)
    prepared = prepare_batch([taken], mask_truncated=True, num_updates=1, known_weights=lambda _: True)
    assert prepared.masked == {1: "unjudged", 3: "unjudged"}
    advantages = [s.advantages[s.loss_mask][0] for s in with_advantages(prepared, LossConfig()).sequences]
    # Of the judged two: mean 0.5, unbiased std sqrt(0.5) = 0.70711; 0.5 / (0.70711 + 1e-4) = 0.70701.
    np.testing.assert_allclose(advantages, [0.70701, -0.70701], atol=1e-5)


def test_the_doctor_says_that_no_answer_to_the_first_rows_is_judged(code: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "gt_answer": "4", "task": "coding"}\n')
    plain = config_of(code, "maths", {}).model_dump(mode="json", exclude_unset=True)
    data = {"train": str(tmp_path / "rows.jsonl")}
    (found,) = made(parse_config({**plain, "data": data}, "test"), "reward")
    assert (found.state, found.found) == (
        "WARN", f"{code}:maths judges no answer to the first 1 rows: it returned None",
    )  # fmt: skip
