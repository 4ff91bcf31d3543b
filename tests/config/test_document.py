"""What the config says of its keys: every key is described, the page is current, ``--explain`` finds keys."""

import re
from pathlib import Path

import pytest

from async_rl.config.contradictions import value_of
from async_rl.config.document import explain, explain_json, origin_of, preset_line, tables
from async_rl.config.loading import default_config, load_config, parse_config
from async_rl.config.loss_names import PRESETS
from async_rl.config.rules import Rule
from async_rl.config.scorer import ScorerConfig
from async_rl.errors import ConfigError
from tests.config.page import markdown

ROOT = Path(__file__).resolve().parents[2]
KEYS = [key for table in tables() for key in table.keys]
UNITS = {"_s": "second", "_bytes": "bytes", "_tokens": "token"}


def test_the_page_is_current():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == markdown(), "write it anew: python -m tests.config.page > docs/config.md"


def test_every_key_is_described_in_a_sentence_with_its_unit():
    wrong: list[str] = []
    for key in KEYS:
        text = key.description
        if not (text[:1].isupper() and text.endswith(".") and len(text.split()) >= 4):
            wrong.append(f"{key.name}: expected a sentence of four words or more, got {text!r}")
        unit = next((unit for ending, unit in UNITS.items() if key.name.endswith(ending)), "")
        if unit not in text.lower():
            wrong.append(f"{key.name}: expected its unit, {unit}, in {text!r}")
    assert not wrong, "\n".join(wrong)


def test_every_key_of_a_config_is_described():
    config = parse_config({"run": {"dir": "r"}, "model": {"path": "m"}}, "test")
    values = {f"{section}.{key}": value for section, keys in config.model_dump().items() for key, value in keys.items()}
    assert {key for key, value in values.items() if not isinstance(value, dict)} <= {key.name for key in KEYS}


def test_a_key_is_explained_with_its_value_its_values_and_its_default():
    overrides = ["checkpoint.every=7"]
    config = load_config(ROOT / "configs" / "quickstart.toml", overrides)
    assert explain(config, "checkpoint.every", width=80, overrides=overrides) == [
        "checkpoint.every = 7",
        "    Steps between two checkpoints; 0 writes one only at the end.",
        "    Values: integer, at least 0. Default: 50. From: --set.",
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "origin"),
    [
        ((), "run.dir", "file"),
        ((), "data.curriculum.chance", "default"),
        (("loss.preset=grpo",), "loss.kl_coef", "preset grpo"),
        (("loss.preset=grpo",), "loss.clip_high", "preset grpo"),  # no more the default's, which are DAPO's
        (("loss.preset=grpo", "loss.kl_coef=0"), "loss.kl_coef", "--set"),
        (("loss.kl_coef=0.1",), "loss.kl_estimator", "loss.kl_placement"),
        (("data.columns.prompt=question",), "data.columns", "--set"),
    ],
)
def test_every_value_has_an_origin(overrides: tuple[str, ...], key: str, origin: str):
    config = load_config(ROOT / "configs" / "quickstart.toml", overrides)
    assert explain_json(config, key, overrides)[key]["from"] == origin


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_sets_is_told_in_one_line(preset: str):
    config, default = default_config([f"loss.preset={preset}"]), default_config()
    names = [key.name for key in KEYS if key.name.startswith("loss.") and key.name != "loss.preset"]
    assert {origin_of(config, name) for name in names} == {"default", f"preset {preset}"}
    told = re.findall(r"loss\.\w+(?= = )", preset_line(config))
    assert told == [name for name in names if value_of(config, name) != value_of(default, name)]


def test_a_section_is_explained_key_by_key_and_nothing_means_all():
    config = load_config(ROOT / "configs" / "quickstart.toml")
    lines = explain(config, "queue", width=80)
    assert lines[0] == "queue.address (unset)"
    assert max(map(len, lines)) <= 80
    shown = {line.split()[0] for line in explain(config, None, width=80) if line and not line.startswith(" ")}
    entries = {f"loss.rules.{key}" for key in Rule.model_fields}
    entries |= {f"scorer.NAME.{key}" for key in ScorerConfig.model_fields}
    assert shown == {key.name for key in KEYS} | entries


def test_an_unknown_key_is_refused_with_what_was_meant():
    config = load_config(ROOT / "configs" / "quickstart.toml")
    with pytest.raises(ConfigError, match=r"got 'queue\.max_stalenes'; did you mean queue\.max_staleness\?"):
        explain(config, "queue.max_stalenes", width=80)
    with pytest.raises(ConfigError, match="the sections are run, model"):
        explain(config, "xyz", width=80)
