"""The page for users of TRL and verl: every setting that they name loads, and every key has an answer."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from async_rl.config.config import Config
from async_rl.config.loading import load_config, parse_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PARTS = dict(
    zip(
        ("trl", "verl"),
        (DOCS / "coming_from.md").read_text(encoding="utf-8").split("\n## A command of verl\n"),
        strict=True,
    )
)
SETTING = re.compile(r"`([a-z]+(?:\.[a-z_]+)+) ?= ?([^`]+)`")
NUM_GRPO_KEYS = 79
"""TRL 1.16's own keys of GRPOConfig."""


def cells_of(part: str) -> list[list[str]]:
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


ROWS = [(name, *cells) for name, part in PARTS.items() for cells in cells_of(part)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1][:60]}")
def test_every_key_of_the_other_trainer_has_a_setting_that_loads_or_a_reason(row: tuple[str, ...], tmp_path: Path):
    _, _, answer = row
    settings = [(key, value) for key, value in SETTING.findall(answer) if key.split(".")[0] in Config.model_fields]
    reasons = r"not here, because \w.{15}|always|the default|`async-rl |`reward\.model`"
    assert settings or re.search(reasons, answer), row
    for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)\b", answer):
        if key.split(".")[0] in Config.model_fields:
            check_exists(key)
    if len({key for key, _ in settings}) < len(settings):  # alternatives
        for setting in settings:
            load(tmp_path, [setting])
    elif settings:
        load(tmp_path, settings)


def check_exists(key: str) -> None:
    model: object = Config
    for part in key.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return
        assert part in model.model_fields, key
        model = model.model_fields[part].annotation


def load(directory: Path, settings: list[tuple[str, str]]) -> None:
    path = directory / "config.toml"
    path.write_text('[run]\ndir = "run"\n[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n')
    (directory / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    chosen = [f"{key}={value.replace('tools.json', str(directory / 'tools.json'))}" for key, value in settings]
    load_config(path, chosen)


def test_the_ported_command_loads():
    (block,) = re.findall(r"```toml\n(.*?)```", PARTS["verl"], re.DOTALL)
    config = parse_config(tomllib.loads(block), "the page")
    assert config.reward.types[0].is_user_code
    assert config.loss.is_kl_in_loss


def test_the_page_has_every_key_of_grpo_config_once():
    table = PARTS["trl"].split("## The keys of GRPOConfig")[1].split("\n## ")[0]
    keys = [key for cells in cells_of(table) for key in re.findall(r"`(\w+)`", cells[0])]
    assert len(keys) == len(set(keys)) == NUM_GRPO_KEYS
