"""The table of the predecessors' features in docs/predecessors.md: every setting that it names exists and loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from tests.config.predecessors import CHECKLIST, ROWS, settings_of

NUM_FEATURES = 116
"""Lines of the checklist that the table answers."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that leaves every feature at its default, beside the files that rows name."""
    directory = tmp_path_factory.mktemp("predecessors")
    (directory / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    path = directory / "config.toml"
    path.write_text('[run]\ndir = "run"\n[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n')
    return path


@pytest.mark.parametrize("row", [row for row in ROWS if settings_of(row)], ids=lambda row: row.split(" | ")[0][2:40])
def test_the_settings_of_a_row_load_together(row: str, base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(base.parent)
    chosen: dict[str, str] = {}
    for key, value in settings_of(row):
        model: object = Config
        for part in key.split("."):
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                break  # a table of the user's own keys
            assert part in model.model_fields, key
            model = model.model_fields[part].annotation
        if value is None:
            continue
        if key in chosen:  # two values of one key are alternatives
            load(base, chosen)
        chosen[key] = value
    load(base, chosen)


def load(base: Path, chosen: dict[str, str]) -> None:
    load_config(base, [f"{key}={value}" for key, value in chosen.items()])


def test_the_checklist_has_a_row_for_each_of_its_lines_and_each_row_an_answer():
    assert len(CHECKLIST) == NUM_FEATURES
    for row in CHECKLIST:
        cell = row.strip("| ").split(" | ")[-1]
        reasons = (
            "not planned: ",
            "not needed: ",
            "always",
            "the same",
            "the default",
            "async-rl ",
            "when the config",
        )
        assert settings_of(row) or any(reason in cell for reason in reasons) or "`" in cell, row
        if "not planned" in cell:
            assert re.search(r"not planned: \w.{20}", cell), f"expected a reason: {row}"
