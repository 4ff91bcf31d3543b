"""What the pages for users of other trainers list: its settings load, or it says why there are none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from async_rl.config.config import Config
from async_rl.config.contradictions import value_of
from async_rl.config.loading import flat, load_config
from async_rl.config.other_trainers import TABLE
from async_rl.extensions.quickstart.from_verl import port
from tests.config.predecessors import ROOT, ROWS, settings_of

NUM_FEATURES = 116
"""Lines of the checklist that the table of predecessors answers."""
NUM_GRPO_KEYS = 79
"""TRL 1.16's own keys of GRPOConfig."""
REASON = re.compile(r"not (here, because|planned:|needed:) \w.{15}|always|the same|the default|when the config|`.+`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[:60])
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


def test_the_page_has_every_setting_of_trl_and_verl_with_our_keys_or_a_reason():
    told: dict[str, str] = {}
    prefix = ""
    for line in (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").splitlines():
        names = re.findall("`([^`]+)`", line.split(" | ")[0])
        if line.endswith("| here |"):
            prefix = "".join(f"{name}." for name in names)
        told |= {prefix + name: line for name in names if line.startswith("| `")}
    for row in TABLE["settings"]:
        keys, text = row.get("to", []), row.get("text", "")
        if keys or "*" not in row["name"]:
            assert all(part in told[row["name"]] for part in (*keys, text)), row
        assert keys or text, row
        list(map(check_exists, keys))
    raw: dict[str, Any] = {}
    port({}, raw)
    for key, value in flat(raw).items():
        assert key not in told or f"| `{json.dumps(value)}` |" in told[key]


def test_every_value_on_the_page_loads_and_what_is_unset_is_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text('[run]\ndir = "run"\n[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n')
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    for key, value in re.findall(r"`([a-z]+\.[a-z_.]+)=([^`]+)`", page):
        kl = {"loss.kl_coef": "0.1", "loss.kl_placement": "reward"} if key.startswith("loss.kl_") else {}
        load({**kl, key: value})
    defaults, trl = load_config("config.toml"), dict(one.split("=") for one in TABLE["unset"]["TRL"])
    unset = page.partition("## If you set nothing")[2].partition("\n## ")[0]
    for key, of_trl, ours in re.findall(r"^\| `(\S+)` \| (.*?) \|.*\| `(.*)` \|$", unset, re.MULTILINE):
        found = value_of(defaults, key)
        assert ours == json.dumps(list(found) if isinstance(found, tuple) else found), key
        assert of_trl.strip("`") == trl.get(key, ""), key


def test_the_tables_have_all_features_of_the_predecessors_and_every_key_of_grpo_config():
    assert len(ROWS) == NUM_FEATURES
    names = [row["name"] for row in TABLE["settings"]]
    assert len(names) == len(set(names))
    assert names.index("output_dir") == NUM_GRPO_KEYS
