"""Sums of several rewards: their weights, ``reward.accuracy``, and a None that says nothing of an answer."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.config.config import Config
from async_rl.config.loss import LossConfig
from async_rl.data.dataset import load_train_rows
from async_rl.errors import RewardError
from async_rl.generator.start.worker import grading_threads
from async_rl.launch.checks.user_code_trial import _score_rows, try_reward
from async_rl.learner.data.batch import prepare_batch
from async_rl.learner.losses.advantages import with_advantages
from async_rl.net.codec import encode_group
from async_rl.queue.core.groups import read_summary
from async_rl.queue.messages import TakenGroup
from async_rl.records import Prompt
from async_rl.rewards.functions import MAX_CONCURRENT_CALLS, FunctionReward
from async_rl.rewards.records import UNJUDGED, RewardInput, RewardOutput
from async_rl.rewards.registry import NoReward, RewardSum, build_reward
from tests.config.made import a_config
from tests.launch.checks.made import made
from tests.rewards.scripted import sampled_group

SOURCE = """
def brevity(item):
    return 1.0 - item.num_tokens / item.max_new_tokens

def third(items):
    return [1 / 3 for _ in items]

def points(item):
    return float(len(item.text))

def grade(item):
    return 2.0

def fails(item):
    raise ValueError("no grade")

def once(item, calls=[]):
    calls.append(1)
    return len(calls) / 4

async def judged(item):
    return 1.0

# The recipe of TRL's documentation for several tasks: each function judges the rows of its own.
def _of(kind, completions, tasks, known):
    return [float(c[0]["content"] == a) if t == kind else None for c, t, a in zip(completions, tasks, known)]

def maths(completions, task, gt_answer, **kwargs):
    return _of("maths", completions, task, gt_answer)

def coding(completions, task, gt_answer, **kwargs):
    return _of("coding", completions, task, gt_answer)

def polite(completions, **kwargs):
    return [float("please" in c[0]["content"]) for c in completions]
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path}/mine.py"


def config_of(code: str, reward: dict[str, Any]) -> Config:
    """A config whose reward may name functions of ``SOURCE`` as :NAME."""
    extra = {name.replace(":", f"{code}:"): weight for name, weight in reward.get("extra", {}).items()}
    named = {key: reward[key].replace(":", f"{code}:") for key in ("type", "accuracy") if key in reward}
    settings = {"soft_overlong": False, **reward, **named, "extra": extra}
    return a_config(reward=settings, generator={"allow_code": [code]}, queue={"filter_range": []})


def score(config: Config, *texts: str, task: str = "maths", finish_reason: Any = "stop") -> list[RewardOutput]:
    chat = [{"role": "user", "content": ""}]
    num_tokens = 100 if finish_reason == "length" else 10
    data = {"gt_answer": "2", "task": task}
    with closing(build_reward(config)) as reward:
        return reward.score_group([RewardInput(text, data, num_tokens, 100, finish_reason, chat) for text in texts])


WHOLE = "<think>\na\n</think>\n<answer>\n2\n</answer>"
TASKS = {"type": ":maths", "extra": {":coding": 2.0}}
POLITE = {"type": ":maths", "extra": {":coding": 1.0, ":polite": 1.0}}


@pytest.mark.parametrize(
    ("reward", "text", "task", "parts", "accuracy"),
    [
        # 10 of 100 tokens: brevity 0.9, times 0.5; the whole form is worth 0.3, times 2.
        (
            {"type": "exact", "scale": 4.0, "extra": {"xml_format": 2.0, ":brevity": 0.5}},
            WHOLE, "", {"correct": 4.0, "xml_format": 0.6, "brevity": 0.45}, 1.0,
        ),
        ({"type": "exact", "extra": {":third": 3.0}}, "3", "", {"correct": 0.0, "third": 1.0}, 0.0),
        # Another reward says what is right, and adds nothing, or is scored once where it is added too.
        ({"type": ":points", "accuracy": "boxed"}, r"\boxed{2}", "", {"points": 9.0}, 1.0),
        ({"type": ":points", "accuracy": "boxed"}, r"\boxed{3}", "", {"points": 9.0}, 0.0),
        ({"type": "exact", "extra": {":once": 2.0}, "accuracy": ":once"}, "2", "", {"correct": 1.0, "once": 0.5}, 0.25),
        ({"type": "exact", "accuracy": "exact"}, "2", "", {"correct": 1.0}, 1.0),
        ({"type": ":points", "extra": {":points": 2.0}}, "abc", "", {"points": 9.0}, 3.0),
        # Each task is judged by its own function; the accuracy is the mean of those that judge, or the one named.
        (TASKS, "2", "maths", {"maths": 1.0}, 1.0),
        (TASKS, "2", "coding", {"coding": 2.0}, 1.0),
        (TASKS, "5", "coding", {"coding": 0.0}, 0.0),
        (POLITE, "2", "coding", {"coding": 1.0, "polite": 0.0}, 0.5),
        ({**POLITE, "accuracy": ":coding"}, "2", "coding", {"coding": 1.0, "polite": 0.0}, 1.0),
        ({"type": "none", "extra": {":maths": 1.0}}, "2", "maths", {"maths": 1.0}, 0.0),
    ],
    ids=str,
)  # fmt: skip
def test_rewards_are_added_with_their_weights_and_one_says_what_is_right(
    code: str, reward: dict[str, Any], text: str, task: str, parts: dict[str, float], accuracy: float
):
    (output,) = score(config_of(code, reward), text, task=task)
    assert output.parts == pytest.approx(parts)
    assert output.accuracy == accuracy


def test_an_answer_that_no_function_judges_is_unjudged_unless_there_is_none(code: str):
    assert score(config_of(code, TASKS), "2", task="poetry") == [UNJUDGED]
    assert score(config_of(code, {"type": "none", "extra": {":maths": 1.0}}), "2", task="poetry") == [UNJUDGED]
    alone = RewardSum(NoReward(), scale=1.0, overlong=None)  # of a run that learns from a teacher
    assert alone(RewardInput("4", {}, 2, 8, "stop")) == RewardOutput({}, 0.0)


def test_overlong_answers_are_punished_after_all_is_summed(code: str):
    # zero_at_limit takes back everything, the extra rewards too: 1 + 0.25 * 1/3 * 3 - 1.25 = 0.
    config = config_of(code, {"type": "exact", "overlong": "zero_at_limit", "extra": {":third": 0.75}})
    (output,) = score(config, "2", finish_reason="length")
    assert output.parts == pytest.approx({"correct": 1.0, "third": 0.25, "overlong": -1.25})


def test_a_sum_waits_for_groups_and_has_threads_for_async_calls_if_one_of_its_rewards_needs_them(code: str):
    for name, needs_group, num_threads in ((":third", True, 1), (":judged", False, MAX_CONCURRENT_CALLS)):
        config = config_of(code, {"type": "exact", "extra": {name: 1.0}})
        with closing(build_reward(config)) as reward:
            assert (reward.needs_whole_group, grading_threads(config, reward)) == (needs_group, num_threads)


def test_an_accuracy_outside_0_and_1_is_refused(code: str):
    with pytest.raises(RewardError, match=r"^reward.accuracy: expected an accuracy from 0 to 1, got 2; let"):
        score(config_of(code, {"type": "exact", "accuracy": ":grade"}), "2")


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


def test_a_failing_function_is_named_before_the_run(code: str):
    (found,) = try_reward(config_of(code, {"type": "exact", "accuracy": ":fails"}), [((), {"gt_answer": "2"})])
    assert found.state == "FAIL"
    assert re.match(r"reward\.accuracy: .*fails can't score an answer to training row 0", found.message)


def test_a_function_that_depends_on_chance_or_judges_nothing_is_named_before_the_run(code: str, tmp_path: Path):
    error, note = _score_rows(config_of(code, {"type": ":once"}), [((), {"gt_answer": "2"})])
    # Two answers are scored, then again: 1/4 and 2/4, then 3/4 and 4/4.
    assert (error, "gave one answer to training row 0 the rewards 0.25 and 0.75" in note) == ("", True)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "gt_answer": "4", "task": "coding"}\n')
    reward, data = {"type": f"{code}:maths"}, {"train": str(tmp_path / "rows.jsonl")}
    (found,) = made(a_config(reward=reward, data=data, generator={"allow_code": [code]}), "reward")
    assert (found.state, "maths judges no answer to the first 1 rows" in found.found) == ("WARN", True)


@pytest.mark.parametrize("prompt_format", ["chat", "text"])
def test_a_reward_is_tried_with_prompts_and_completions_in_the_form_of_the_run(prompt_format: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "target": 2}\n')
    said = "completions[0], prompts[0]" if prompt_format == "text" else "*completions[0], prompts[0][-1]['content']"
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, completions, target, **_):\n"
        f"    answer, prompt = {said}\n"
        f"    assert prompt == '1 + 1?' and isinstance(answer, {'str' if prompt_format == 'text' else 'dict'})\n"
        "    return [0.5 for _ in completions]\n"
    )
    code = f"{tmp_path}/mine.py"
    data = {"train": str(tmp_path / "rows.jsonl"), "prompt_format": prompt_format}
    config = a_config(reward={"type": f"{code}:mine"}, generator={"allow_code": [code]}, data=data)
    rows = [(row.messages, row.reward_data) for row in load_train_rows(config).rows]
    assert _score_rows(config, rows) == ("", "")
    assert [finding.state for finding in made(config, "reward")] == ["WARN"]  # only for rewarding something else
