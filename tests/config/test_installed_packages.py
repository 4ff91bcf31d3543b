"""What installed packages offer: rewards and environments by their names, and tables ``[extension.NAME]``."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl import registry
from async_rl.api.inputs import read_inputs
from async_rl.config.config import Config
from async_rl.config.extension import check_extension_settings, extension_settings
from async_rl.config.loading import changed_keys, config_from_toml, config_to_toml, load_config
from async_rl.errors import ConfigError, ExtensionError
from async_rl.extensions.insight.evaluation.offline import eval_settings
from async_rl.launch.checks.extensions import find_packages
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
@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        ("environment.name", "one-turn", "grading"),
        ("environment.name", "my_env", "my_env"),
        ("reward.type", "boxed", "boxed"),  # a name of ours stays ours
    ],
)
def test_a_name_is_that_of_the_package_s_own_code_or_stays(tmp_path: Path, key: str, name: str, expected: str):
    section, _, last = key.partition(".")
    assert getattr(getattr(loaded(tmp_path, f'{key} = "{name}"'), section), last) == expected


def test_no_metadata_is_read_for_a_name_of_ours_or_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "entry_points", None)  # reading it fails
    for name in ("code", "boxed", "my_rewards:score", "my_rewards.py:score"):
        loaded(tmp_path, f'reward.type = "{name}"')
    for name in ("async_rl.environments.arithmetic", "my_env.py", "my_env:Game"):
        loaded(tmp_path, f'environment.name = "{name}"')


@pytest.mark.usefixtures("grading")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('reward.type = "best"', r"reward\.type: expected boxed, .*, none, brief, nested, module:function or"),
        ('environment.name = "two-turns"', r"environment\.name: expected one-turn, file\.py"),
        (
            'reward.type = "nested"',
            r"MODULE:FUNCTION from the package grading 1\.0, .* got grading:Rules\.brevity; update",
        ),
    ],
    ids=["reward", "environment", "no function"],
)
def test_a_name_that_leads_nowhere_is_refused_with_those_that_are_offered(tmp_path: Path, text: str, message: str):
    with pytest.raises((ConfigError, ExtensionError), match=message):
        loaded(tmp_path, text)


def test_a_package_that_can_not_be_imported_is_named(grading: Path, tmp_path: Path):
    (grading / "grading.py").write_text("1 / 0\n")
    config = loaded(tmp_path, '[reward]\ntype = "brief"\n[generator]\nallow_code = ["grading"]\n')
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: .* package grading 1\.0, which offers it as brief"):
        build_reward(config)


SETTINGS = """
from pydantic import BaseModel, Field

class Settings(BaseModel, extra="forbid"):
    limit: int = Field(default=3, ge=1)
"""
GREETING = "[async_rl.config]\ngreeting = greeting:Settings\n[async_rl.rewards]\nwarm = greeting:warm\n"


def with_tables(tables: str) -> Config:
    return config_from_toml(f'run.dir = "run"\nmodel.path = "model"\n{tables}', "the test")


def test_a_table_is_read_as_the_model_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "greeting", {"greeting.py": SETTINGS}, GREETING, monkeypatch)
    config = with_tables("extension.greeting.limit = 5")
    assert extension_settings(config, "greeting").model_dump() == {"limit": 5}
    assert extension_settings(with_tables(""), "greeting").model_dump() == {"limit": 3}
    again = config_from_toml(config_to_toml(config), "the file that the run wrote")
    assert again == config
    changed = changed_keys(config, with_tables("extension.greeting.limit = 6"))
    assert changed == {"extension.greeting.limit": (5, 6)}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("extension.greeting.limit = 0", r"^extension\.greeting\.limit: expected at least 1, got 0"),
        ("extension.greeting.limits = 1", r"^extension\.greeting\.limits: unknown key"),
        ("extension.other.limit = 1", r"^extension\.other: expected .*which are: greeting; install the package"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(
    tables: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, "greeting", {"greeting.py": SETTINGS}, GREETING, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        check_extension_settings(with_tables(tables))


def test_a_model_that_can_not_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "greeting", {"greeting.py": "1 / 0"}, GREETING, monkeypatch)
    with pytest.raises(ExtensionError, match=r"greeting:Settings, which the package greeting 1\.0 offers"):
        check_extension_settings(with_tables("extension.greeting.limit = 5"))


def test_the_doctor_lists_packages_and_names_broken_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "good", "greeting", {"greeting.py": SETTINGS}, GREETING, monkeypatch)
    install(tmp_path / "bad", "broken", {"broken.py": "1 / 0"}, "[async_rl.commands]\noops = broken:app\n", monkeypatch)
    findings = {(finding.state, finding.found) for finding in find_packages()}
    assert ("OK", "greeting 1.0 offers config: greeting, rewards: warm") in findings
    assert ("OK", "broken 1.0 offers commands: oops") in findings
    (warning,) = (found for state, found in findings if state == "WARN")
    assert warning.startswith("expected broken:app, which the package broken 1.0 offers as oops")
