"""The pages for users of other trainers: each row that they list has settings that load, or says why there are none."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from async_rl.config.config import Config
from async_rl.config.loading import load_config, parse_config
from tests.config.predecessors import ROOT, ROWS, settings_of

COMING_FROM = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
TRL, VERL = COMING_FROM.split("\n## A command of verl\n")
NUM_FEATURES = 116
"""Lines of the checklist that the table of predecessors answers."""
NUM_GRPO_KEYS = 79
"""TRL 1.16's own keys of GRPOConfig."""
REASON = re.compile(r"not (here, because|planned:|needed:) \w.{15}|always|the same|the default|when the config|`.+`")
OF_TRL_AND_VERL = [line.strip("| ") for line in COMING_FROM.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("row", [*ROWS, *OF_TRL_AND_VERL], ids=lambda row: row[:60])
def test_every_row_has_settings_that_load_or_a_reason(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    Path("config.toml").write_text('[run]\ndir = "run"\n[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n')
    assert REASON.search(row.split(" | ")[-1])
    chosen: dict[str, str] = {}
    for key, value in settings_of(row):
        check_exists(key)
        if key in chosen:  # two values of one key are alternatives
            load(chosen)
        chosen |= {} if value is None else {key: value}
    load(chosen)


def load(chosen: dict[str, str]) -> None:
    load_config("config.toml", [f"{key}={value}" for key, value in chosen.items()])


def check_exists(key: str) -> None:
    model: object = Config
    for part in key.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return  # a table of the user's own keys
        assert part in model.model_fields, key
        model = model.model_fields[part].annotation


def test_the_tables_have_all_features_of_the_predecessors_and_every_key_of_grpo_config_once():
    assert len(ROWS) == NUM_FEATURES
    table = TRL.split("## The keys of GRPOConfig")[1].split("\n## ")[0]
    keys = [key for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", cell)]
    assert len(keys) == len(set(keys)) == NUM_GRPO_KEYS


def test_the_ported_command_loads():
    (block,) = re.findall(r"```toml\n(.*?)```", VERL, re.DOTALL)
    config = parse_config(tomllib.loads(block), "the page")
    assert config.reward.types[0].is_user_code
    assert config.loss.is_kl_in_loss
