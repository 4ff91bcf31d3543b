"""docs/algorithms.md agrees with the config: every preset, key and refusal is there; every key that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from async_rl.config import Config
from async_rl.loss_config import CONTRADICTIONS, PRESETS, LossConfig
from async_rl.metrics import METRIC_KEYS

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_row_with_all_that_it_sets(preset: str):
    (row,) = re.findall(rf"^\| `{preset}`.*$", section("Presets"), re.MULTILINE)
    for key, value in PRESETS[preset].items():
        shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else value
        (found,) = re.findall(rf"`{key} = ([^`]+)`", row)
        assert found == shown if isinstance(shown, str) else float(found) == shown


@pytest.mark.parametrize("key", LossConfig.model_fields)
def test_every_loss_key_is_explained(key: str):
    assert re.search(rf"`(loss\.)?{key}\b", PAGE)


def test_every_contradiction_is_listed_once():
    listed = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section("Refused"), re.MULTILINE)
    assert sorted(listed) == sorted(", ".join(f"`{key}`" for key in c.keys) for c in CONTRADICTIONS)


def test_every_key_that_is_named_exists():
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    ours = re.sub(r"^\|[^|]+\|", "", PAGE, flags=re.MULTILINE)  # first cells name other trainers' keys
    for name, key in set(re.findall(r"`([a-z]+)\.([a-z_]+)\b", ours)):
        model = sections.get(name)
        if isinstance(model, type) and issubclass(model, BaseModel):
            assert key in model.model_fields, f"{name}.{key}"


def test_every_metric_to_watch_is_one():
    rows = re.findall(r"^\| `\w+`.*\| ([^|]+) \|$", section("Presets"), re.MULTILINE)
    named = set(re.findall(r"`((?!masked)\w+/\w+)`", "".join(rows)))
    assert len(named) > 3
    assert named <= set(METRIC_KEYS)
