"""``reward.accuracy``: another reward than the one that is trained on says which answers are right."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.data.dataset import load_train_rows
from async_rl.errors import ConfigError, RewardError
from async_rl.launch.checks.user_code_trial import _score_rows, try_reward
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import build_reward
from tests.launch.checks.made import made

POINTS = "def points(item):\n    return float(len(item.text))\n\n\ndef grade(item):\n    return 2.0\n"


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(POINTS)
    return f"{tmp_path}/mine.py"


def config_of(code: str, **reward: Any) -> Config:
    return a_config(reward={"soft_overlong": False, **reward}, generator={"allow_code": [code]})


def a_config(**sections: Any) -> Config:
    return parse_config({"run": {"dir": "r"}, "model": {"path": "m"}, **sections}, "test")


def score(config: Config, text: str) -> RewardOutput:
    with closing(build_reward(config)) as reward:
        return reward(RewardInput(text, {"gt_answer": "2"}, 2, 8, "stop"))


def test_a_built_in_reward_says_what_is_right_and_adds_nothing(code: str):
    config = config_of(code, type=f"{code}:points", accuracy="boxed")
    assert score(config, r"\boxed{2}") == RewardOutput({"points": 9.0}, 1.0, "2")
    assert score(config, r"\boxed{3}") == RewardOutput({"points": 9.0}, 0.0, "3")


def test_an_extra_reward_can_say_what_is_right_and_is_scored_once(code: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        POINTS + "\n\ndef once(item, calls=[]):\n    calls.append(1)\n    return len(calls) / 4\n"
    )
    config = config_of(code, type="exact", extra={f"{code}:once": 2.0}, accuracy=f"{code}:once")
    assert config.reward.names == ("exact", f"{code}:once")
    assert score(config, "2") == RewardOutput({"correct": 1.0, "once": 0.5}, 0.25)


def test_the_main_reward_says_what_is_right_if_no_other_does(code: str):
    assert score(config_of(code, type="exact"), "2").accuracy == 1.0
    assert score(config_of(code, type="exact", accuracy="exact"), "2") == score(config_of(code, type="exact"), "2")


def test_a_reward_that_is_added_twice_needs_no_accuracy(code: str):
    name = f"{code}:points"
    assert score(config_of(code, type=name, extra={name: 2.0}), "abc") == RewardOutput({"points": 9.0}, 3.0)


def test_an_accuracy_outside_0_and_1_is_refused(code: str):
    with pytest.raises(RewardError, match=r"^reward.accuracy: expected an accuracy from 0 to 1, got 2; let"):
        score(config_of(code, type="exact", accuracy=f"{code}:grade"), "2")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"accuracy": "none"}, 'got "none"; leave the key out'),
        ({"accuracy": "boxes"}, "expected boxed, think_answer_tags"),
        ({"type": "none", "accuracy": "boxed"}, "nothing would be learned"),
    ],
)
def test_what_can_not_say_what_is_right_is_refused(code: str, reward: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_of(code, **reward)


def test_a_reward_model_may_be_trained_on_while_answers_are_filtered_by_what_is_right(code: str):
    config = a_config(
        reward={"type": "model", "model": "judge", "accuracy": "boxed"},
        scorer={"judge": {"model": "m", "address": "tcp://127.0.0.1:1"}},
        queue={"filter_range": [0.01, 0.99]},
    )
    assert config.row_needs == ("gt_answer",)


def test_a_failing_function_is_named_before_the_run(code: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def grade(item):\n    raise ValueError('no grade')\n")
    (found,) = try_reward(config_of(code, type="exact", accuracy=f"{code}:grade"), [((), {"gt_answer": "2"})])
    assert found.state == "FAIL"
    assert re.match(r"reward\.accuracy: .*grade can't score an answer to training row 0", found.message)


@pytest.mark.parametrize("prompt_format", ["chat", "text"])
def test_a_reward_is_tried_with_prompts_and_completions_in_the_form_of_the_run(prompt_format: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "target": 2}\n')
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, completions, target, **_):\n"
        + ("    assert isinstance(completions[0], str) and prompts[0] == '1 + 1?'\n" if prompt_format == "text" else
           "    assert completions[0][0]['content'] and prompts[0][-1]['content'] == '1 + 1?'\n")
        + "    return [0.5 for _ in completions]\n"
    )  # fmt: skip
    code = f"{tmp_path}/mine.py"
    data = {"train": str(tmp_path / "rows.jsonl"), "prompt_format": prompt_format}
    config = a_config(reward={"type": f"{code}:mine"}, generator={"allow_code": [code]}, data=data)
    rows = [(row.messages, row.reward_data) for row in load_train_rows(config).rows]
    assert len(rows) == 1
    assert _score_rows(config, rows) == ("", "")
    assert [finding.state for finding in made(config, "reward")] == ["WARN"]  # only for rewarding something else


def test_a_reward_that_depends_on_chance_is_named_before_the_run(code: str, tmp_path: Path):
    counts = f"{tmp_path}/counts.py"
    Path(counts).write_text("calls = []\ndef grade(item):\n    calls.append(0)\n    return float(len(calls))\n")
    error, note = _score_rows(config_of(counts, type=f"{counts}:grade"), [((), {"gt_answer": "2"})])
    # Two answers are scored, then again: 1 and 2, then 3 and 4.
    assert error == ""
    assert note == (
        f"reward.type: {counts}:grade gave one answer to training row 0 the rewards 1 and 3: if rewards depend on "
        f"chance, less is learned, or nothing; let equal answers get equal rewards"
    )
    assert _score_rows(config_of(code, type=f"{code}:points"), [((), {"gt_answer": "2"})]) == ("", "")


def test_the_doctor_grades_by_it_and_only_warns_of_a_function_that_rewards_something_else(code: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "gt_answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def brief(item):\n    return 1 / (1 + len(item.text))\n")

    def found(**reward: Any) -> list[tuple[str, str]]:
        data = {"train": str(tmp_path / "rows.jsonl")}
        config = a_config(
            reward={"soft_overlong": False, "type": f"{code}:brief", **reward},
            generator={"allow_code": [code]},
            data=data,
        )
        return [(finding.state, finding.fix) for finding in made(config, "reward")]

    assert found(accuracy="boxed") == [("OK", "")]
    [(state, fix)] = found()
    assert state == "WARN"
    assert "reward.accuracy can name what tells right from wrong" in fix
