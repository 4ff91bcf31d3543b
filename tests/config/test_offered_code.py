"""Rewards and environments of installed packages, named by what the packages call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl import registry
from async_rl.api.inputs import read_inputs
from async_rl.config.config import Config
from async_rl.config.loading import config_from_toml, config_to_toml, load_config
from async_rl.errors import ConfigError, ExtensionError
from async_rl.extensions.insight.evaluation.offline import eval_settings
from async_rl.process.user_code import code_digests
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import build_reward
from tests.extensions.insight.evaluation.options import eval_options
from tests.packages import install

SOURCE = """
def brevity(item):
    return 1.0 - item.num_tokens / item.max_new_tokens

def reset(extra_info):
    return "Begin."

def step(state, action, extra_info):
    return {"reward": 1.0, "done": True}
"""
OFFERS = """
[async_rl.rewards]
brief = grading:brevity
boxed = grading:brevity
nested = grading:Rules.brevity
[async_rl.environments]
one-turn = grading
"""


@pytest.fixture
def grading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "installed", "grading", {"grading.py": SOURCE}, OFFERS, monkeypatch)
    return tmp_path / "installed"


def loaded(path: Path, text: str, *overrides: str) -> Config:
    (path / "run.toml").write_text(f'run.dir = "run"\nmodel.path = "model"\n{text}')
    return load_config(path / "run.toml", overrides)


@pytest.mark.usefixtures("grading")
def test_an_offered_reward_is_the_package_s_own_code_from_then_on(tmp_path: Path):
    text = '[reward]\ntype = "brief"\naccuracy = "exact"\n[generator]\nallow_code = ["grading"]\n'
    config = loaded(tmp_path, text)
    assert (config.reward.type, config.code_names) == ("grading:brevity", ("grading:brevity",))
    assert config_from_toml(config_to_toml(config), "the file that the run wrote") == config
    digests = code_digests(config.code_names)
    reward = build_reward(config, code_digests=digests)
    assert reward(RewardInput("2", {"gt_answer": "2"}, 25, 100, "stop")).parts["brevity"] == 0.75
    with pytest.raises(ConfigError, match=r"^grading:brevity: expected the learner's source"):
        build_reward(config, code_digests=dict.fromkeys(digests, "0" * 64))
    refused = loaded(tmp_path, text, "generator.allow_code=[]")
    with pytest.raises(ConfigError, match=r'^grading:brevity: .* set generator\.allow_code = \["grading"\]'):
        build_reward(refused)


@pytest.mark.usefixtures("grading")
def test_extra_rewards_and_the_reward_of_the_accuracy_are_found_too(tmp_path: Path):
    config = loaded(tmp_path, '[reward]\ntype = "exact"\naccuracy = "brief"\nextra = {brief = 0.5}')
    assert (config.reward.extra, config.reward.right_by) == ({"grading:brevity": 0.5}, "grading:brevity")
    with pytest.raises(ConfigError, match=r"^reward\.extra: expected each reward once, got brief, grading:brevity;"):
        loaded(tmp_path, '[reward.extra]\nbrief = 0.5\n"grading:brevity" = 0.5')


@pytest.mark.usefixtures("grading")
def test_who_names_an_offered_reward_on_the_command_line_or_in_python_allows_it():
    settings = eval_settings(["base"], eval_options(datasets=("rows.jsonl",), reward__type="brief"))
    inputs = read_inputs(None, {"run": {"dir": "run"}, "model": {"path": "model"}, "reward": {"type": "brief"}})
    for config in (settings.config, inputs.config):
        assert (config.reward.type, config.generator.allow_code) == ("grading:brevity", ("grading",))


@pytest.mark.usefixtures("grading")
def test_an_offered_environment_is_the_package_s_own_code(tmp_path: Path):
    assert loaded(tmp_path, 'environment.name = "one-turn"').environment.name == "grading"
    assert loaded(tmp_path, 'environment.name = "my_env"').environment.name == "my_env"


@pytest.mark.usefixtures("grading")
def test_a_name_of_ours_stays_ours(tmp_path: Path):
    assert loaded(tmp_path, 'reward.type = "boxed"').reward.type == "boxed"


def test_no_metadata_is_read_for_a_name_of_ours_or_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(**_: Any) -> None:
        raise AssertionError("metadata was read")

    monkeypatch.setattr(registry, "entry_points", refuse)
    for name in ("code", "boxed", "my_rewards:score", "my_rewards.py:score"):
        loaded(tmp_path, f'reward.type = "{name}"')
    for name in ("async_rl.environments.arithmetic", "my_env.py", "my_env:Game"):
        loaded(tmp_path, f'environment.name = "{name}"')


@pytest.mark.usefixtures("grading")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('reward.type = "best"', r"reward\.type: expected boxed, .*, none, brief, nested, module:function or"),
        ('environment.name = "two-turns"', r"environment\.name: expected one-turn, file\.py, file\.py:name, module or"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_offered(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


@pytest.mark.usefixtures("grading")
def test_an_offer_that_names_no_function_is_refused_by_its_package(tmp_path: Path):
    message = (
        r"^expected MODULE:FUNCTION from the package grading 1\.0, which offers nested \(async_rl\.rewards\), got "
        r"grading:Rules\.brevity; update or uninstall the package"
    )
    with pytest.raises(ExtensionError, match=message):
        loaded(tmp_path, 'reward.type = "nested"')


def test_a_package_that_can_not_be_imported_is_named(grading: Path, tmp_path: Path):
    (grading / "grading.py").write_text("1 / 0\n")
    config = loaded(tmp_path, '[reward]\ntype = "brief"\n[generator]\nallow_code = ["grading"]\n')
    message = (
        r"^grading:brevity: importing .*grading\.py failed: ZeroDivisionError: .*; update or uninstall the package "
        r"grading 1\.0, which offers it as brief"
    )
    with pytest.raises(ConfigError, match=message):
        build_reward(config)
