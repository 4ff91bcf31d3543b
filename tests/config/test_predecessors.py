"""The tables of docs/predecessors.md: every setting that they name exists and loads, and tests run each feature."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from tests.config.predecessors import FEATURES, ROOT, ROWS, Setting, settings_of
from tests.config.predecessors_runs import OF_EVERY_ROW, RUN_BY

NAMES_OF_THE_USER = ("big", "judge", "model")
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


@pytest.mark.parametrize("row", [row for row in ROWS if settings_of(row)], ids=lambda row: row.split(" | ")[0][:40])
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
    assert len(ROWS) == NUM_FEATURES
    for row in ROWS:
        cell = row.split(" | ")[-1]
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


@cache
def functions_of(path: Path) -> dict[str, str]:
    """The test functions of a file, each with its source and decorators."""
    source = path.read_text(encoding="utf-8")
    return {
        node.name: "\n".join(ast.get_source_segment(source, part) or "" for part in (*node.decorator_list, node))
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@cache
def text_of(path: Path) -> str:
    """A test file and the helpers that it imports; of a benchmark, all files of its folder."""
    source = path.read_text(encoding="utf-8")
    helpers = [
        ROOT / f"{name.replace('.', '/')}.py" for name in re.findall(r"^from (tests\.[\w.]+) import", source, re.M)
    ]
    for name in re.findall(r"^from benchmarks\.(\w+)\.", source, re.M):
        helpers += sorted((ROOT / "benchmarks" / name).glob("*.py"))
    return source + "".join(helper.read_text(encoding="utf-8") for helper in helpers if helper.is_file())


def runs(name: str, feature: str, setting: Setting) -> bool:
    """Whether the test ``name`` runs a setting of ``feature``.

    It takes the settings from the rows that it names, or from every row with such a key; else it writes the key down,
    and the value if that is a name which the user did not choose.
    """
    file, function = name.split("::")
    path = ROOT / "tests" / file
    key, value = setting
    text, section, last = text_of(path), key.partition(".")[0], key.rpartition(".")[2]
    if json.dumps(feature, ensure_ascii=False) in functions_of(path)[function]:
        return True
    if name in OF_EVERY_ROW:
        return f'"{key}"' in text or f'"{section}"' in text
    word = re.fullmatch(r'"([a-z_0-9]+)"', value or "")
    written = section if section == "scorer" else last  # the scorers' names are the user's too
    return re.search(rf"(?:\b|__){written}\b", text) is not None and (
        word is None or word[1] in NAMES_OF_THE_USER or word[1] in text
    )


def test_every_row_names_the_tests_that_run_it():
    assert list(RUN_BY) == list(FEATURES), "correct tests/config/predecessors_runs.py"
    for feature, names in RUN_BY.items():
        assert names or "not planned" in FEATURES[feature], feature


@pytest.mark.parametrize("feature", [feature for feature, names in RUN_BY.items() if names])
def test_a_row_is_run_by_the_tests_that_it_names(feature: str):
    for name in RUN_BY[feature]:
        file, function = name.split("::")
        assert function in functions_of(ROOT / "tests" / file), name
    left = [
        setting
        for setting in settings_of(FEATURES[feature])
        if not any(runs(name, feature, setting) for name in RUN_BY[feature])
    ]
    assert left == [], f"expected each setting in one of {RUN_BY[feature]}"
