"""The pages on algorithms and tasks agree with the config: what there is is there, what is named exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from async_rl.config.config import Config
from async_rl.config.data import DataConfig, EvalConfig, RowField
from async_rl.config.generator import EnvironmentConfig
from async_rl.config.loss import LOSS_KEYS, LossConfig
from async_rl.config.loss_names import OFF_VALUES, PRESETS
from async_rl.config.reward import RewardConfig
from async_rl.learner.losses.own_advantage import load_own_advantage, made_up_rollouts
from async_rl.learner.losses.own_trial import load_own_loss
from async_rl.process.user_code import load_code
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.run.records.metric_table import EVAL_FIGURES, METRIC_KEYS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "algorithms.md").read_text(encoding="utf-8")
TASK_PAGES = "".join(
    (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("agents", "data", "rewards", "environments", "watching", "predecessors")
)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_row_with_all_that_it_sets(preset: str):
    (row,) = re.findall(rf"^\| `{preset}`.*$", section("Presets"), re.MULTILINE)
    for key, value in PRESETS[preset].items():
        if key == "rules":
            assert all(f"the rule `{rule['name']}`" in row for rule in value)
            continue
        value = OFF_VALUES[key] if value is None else value
        shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else value
        (found,) = re.findall(rf"`{key} = ([^`]+)`", row)
        assert found == shown if isinstance(shown, str) else float(found) == pytest.approx(shown, abs=5e-4)


def test_every_loss_key_is_explained():
    assert [key for key in LossConfig.model_fields if not re.search(rf"`(loss\.{key}\b|{key} = )", PAGE)] == []


def test_every_key_that_is_named_exists():
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    ours = re.sub(r"^\|[^|]+\|", "", PAGE, flags=re.MULTILINE)  # first cells name other trainers' keys
    for name, key in set(re.findall(r"`([a-z]+)\.([a-z_]+)\b", ours + TASK_PAGES)):
        model = sections.get(name)
        if isinstance(model, type) and issubclass(model, BaseModel):
            assert key in model.model_fields, f"{name}.{key}"


def test_every_metric_that_is_named_is_one():
    figures = "|".join(sorted({key.split("/")[0] for key in METRIC_KEYS if "/" in key}))
    named = {key.replace("lag_0", "lag_N") for key in re.findall(rf"`((?:{figures})/\w+)`", PAGE)}
    assert len(named) > 5
    assert named <= set(METRIC_KEYS)


def test_every_key_of_data_rewards_and_environments_is_explained():
    models = {"data": DataConfig, "reward": RewardConfig, "environment": EnvironmentConfig, "eval": EvalConfig}
    keys = [f"{section}.{key}" for section, model in models.items() for key in model.model_fields]
    assert [key for key in keys if not re.search(rf"`{key}\b", TASK_PAGES)] == []


def test_every_field_of_a_row_is_explained():
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    assert [field for field in get_args(RowField) if f"| `{field}` |" not in page] == []


def test_every_figure_of_an_evaluation_is_explained():
    figures = (DOCS / "watching.md").read_text(encoding="utf-8").split("\n### Figures\n")[1].split("\n##")[0]
    named = set(re.findall(r"`(\w+)`", figures)) | {"pass_at_N"}  # that is pass_at_1, _2, ... there
    assert EVAL_FIGURES.keys() <= named


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", TASK_PAGES, re.DOTALL))
def test_every_example_config_is_one(block: str):
    raw = tomllib.loads(block)
    raw["sampling"] = {"max_new_tokens": 4096}
    Config.model_validate({"run": {"dir": "r"}, "model": {"path": "m"}, **raw})


def test_the_example_loss_and_advantages_work(tmp_path: Path):
    for name in ("fresh", "group_mean"):
        (source,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"def {name}" in b)
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    loss = {"function": f"{tmp_path}/fresh.py:fresh", "advantage_function": f"{tmp_path}/group_mean.py:group_mean"}
    config = Config.model_validate({"run": {"dir": "r"}, "model": {"path": "m"}, "loss": loss})
    own, advantages = load_own_loss(config), load_own_advantage(config)
    assert own is not None
    assert own.metric_keys == ("loss_mask/old",)
    assert advantages is not None
    found = advantages(made_up_rollouts(config))
    assert list(found[:2]) == [0.5, -0.5]  # of a group of four right and four wrong answers


def test_every_key_that_an_own_loss_replaces_is_listed():
    text = section("A loss of your own")
    assert [key for key in LOSS_KEYS if f"`{key}`" not in text] == []


def test_the_example_rewards_work(tmp_path: Path):
    (source,) = (b for b in re.findall(r"```python\n(.*?)```", TASK_PAGES, re.DOTALL) if "def last_word" in b)
    path = tmp_path / "my_rewards.py"
    path.write_text(source, encoding="utf-8")

    def load(name: str) -> FunctionReward:
        function = load_code(f"{path}:{name}", allowed=[str(path)], digest=None)
        return FunctionReward(name, function, scale=1.0, time_limit_s=5.0)

    items = [
        RewardInput("it is 4", {"gt_answer": "4"}, 25, 100, "stop"),
        RewardInput("5", {"gt_answer": "4"}, 10, 100, "stop"),
    ]
    assert [o.parts["brevity"] for o in load("brevity").score_group(items)] == [0.75, 0.9]
    assert [o.accuracy for o in load("shortest").score_group(items)] == [0.0, 1.0]
    assert load("last_word").score_group(items) == [
        RewardOutput({"right": 1.0, "tried": 0.1}, 1.0, "4"),
        RewardOutput({"right": 0.0, "tried": 0.1}, 0.0, "5"),
    ]
    assert load("judged").is_async
