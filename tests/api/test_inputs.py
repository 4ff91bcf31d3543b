"""What ``async_rl.train`` gets becomes the config that a TOML file has, and its rows become files."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import tomli_w

from async_rl.api.inputs import read_inputs
from async_rl.config.loading import load_config
from async_rl.data.dataset import load_rows_of
from async_rl.errors import ConfigError, DataError
from tests.api.own_rewards import brief, right

TOML = """
[run]
dir = "runs/sums"

[model]
path = "tiny"

[data]
train = "rows.jsonl"
eval = { held_out = "held_out.jsonl" }
columns = { gt_answer = "solution" }

[sampling]
group_size = 8

[reward]
type = "tests.api.own_rewards:right"
scale = 2.0
extra = { "tests.api.own_rewards:brief" = 0.1 }

[generator]
batch_size = 16
allow_code = ["tests.api.own_rewards"]

[eval]
every = 10
sets = { held_out = { num_samples = 4 } }

[loss]
preset = "rloo"
"""
SECTIONS: Mapping[str, Any] = {
    "run": "runs/sums",
    "model": Path("tiny"),
    "data": {"train": "rows.jsonl", "eval": {"held_out": Path("held_out.jsonl")}, "columns": {"gt_answer": "solution"}},
    "sampling": {"group_size": 8},
    "reward": {"type": right, "scale": 2.0, "extra": {brief: 0.1}},
    "generator": {"batch_size": 16},
    "eval": {"every": 10, "sets": {"held_out": {"num_samples": 4}}},
    "loss": {"preset": "rloo"},
}


def toml_file(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(TOML)
    return path


def test_the_sections_of_a_call_are_those_of_a_file(tmp_path: Path):
    assert read_inputs(None, SECTIONS).config == load_config(toml_file(tmp_path))
    assert read_inputs(SECTIONS, {}).config == load_config(toml_file(tmp_path), ["generator.allow_code=" + ALLOWED])


ALLOWED = '["tests.api.own_rewards"]'


@pytest.mark.parametrize("form", ["path", "text", "dict", "config"])
def test_a_base_is_changed_key_by_key_as_by_set(form: str, tmp_path: Path):
    path = toml_file(tmp_path)
    raw = tomllib.loads(TOML)
    before = json.dumps(raw)
    base = {"path": path, "text": str(path), "dict": raw, "config": load_config(path)}[form]
    changes = {"model": "other", "sampling": {"temperature": 0.5}, "reward": {"extra": {"xml_format": 1.0}}}
    changed = read_inputs(base, changes).config
    overrides = ["model.path=other", "sampling.temperature=0.5", "reward.extra.xml_format=1.0"]
    assert changed == load_config(path, overrides)
    assert (changed.sampling.group_size, changed.sampling.temperature) == (8, 0.5)
    assert json.dumps(raw) == before, "the caller's dict is not changed"


def test_a_reward_that_the_call_names_is_allowed_and_one_of_a_base_is_not():
    named = {"run": "r", "model": "m", "reward": "their_rewards.py:good"}
    assert read_inputs(None, named).config.generator.allow_code == ("their_rewards.py",)
    assert read_inputs(named, {}).config.generator.allow_code == ()
    assert read_inputs(None, {**named, "reward": "boxed"}).config.generator.allow_code == ()


def test_the_first_reward_of_a_list_is_the_main_one_and_the_others_have_weight_one():
    config = read_inputs(None, {"run": "r", "model": "m", "reward": [right, brief, "xml_format"]}).config
    assert config.reward.type == "tests.api.own_rewards:right"
    assert config.reward.extra == {"tests.api.own_rewards:brief": 1.0, "xml_format": 1.0}
    assert config.generator.allow_code == ("tests.api.own_rewards",)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"samplin": {"group_size": 8}}, "samplin: unknown key; did you mean sampling?"),
        ({"sampling": 8}, "sampling: expected a table, got 8"),
        ({"generator": 8, "reward": right}, "generator: expected a table, got 8"),
        ({"run": None}, 'expected model, data and run, got no data and no run; pass, say, data="rows.jsonl", '),
        ({"run": None, "environment": {"name": "e:f"}}, r'got no run; pass, say, run="runs/my"$'),
        ({"reward": [right, brief, brief]}, "reward: expected a list of different functions or names, got "),
        ({"reward": [right, {brief: 0.5}]}, 'for weights other than 1 pass {"type": first, "extra": {second: 0.5}}'),
        ({"reward": []}, "got \\[\\]"),
        ({"reward": {"extra": {(lambda item: 1.0): 1.0}}}, "reward.extra: expected a function .*, got a lambda"),
    ],
)
def test_mistakes_are_refused_as_in_a_file(sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read_inputs(None, {"run": "r", "model": "m", **sections})


def test_the_config_of_another_run_is_refused_unless_the_call_names_a_directory(tmp_path: Path):
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps({"run": {"dir": "elsewhere"}, "model": {"path": "m"}}))
    (tmp_path / "run_id").write_text("a1\n")
    with pytest.raises(ConfigError, match=r"run\.dir: expected .*, where .* and its run are, got elsewhere"):
        read_inputs(path, {})
    assert read_inputs(path, {"run": "new"}).config.run.dir == "new"


ROWS = [{"prompt": "1+1: é", "gt_answer": 2}, {"prompt": "2+2:", "gt_answer": 4, "levels": [1, None]}]


def of_numpy() -> list[dict[str, Any]]:
    return [{**ROWS[0], "gt_answer": np.int64(2)}, {**ROWS[1], "levels": [1, None]}]


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), of_numpy()], ids=["list", "tuple", "numpy"])
def test_rows_become_a_file_that_is_named_by_its_digest(rows: Any, tmp_path: Path):
    held_out = datasets.Dataset.from_list([{"prompt": "3+3:", "gt_answer": 6}])
    data = {"train": rows, "eval": {"held_out": held_out}}
    inputs = read_inputs(None, {"run": tmp_path / "run", "model": "m", "data": data})
    assert not (tmp_path / "run").exists(), "nothing is written before the checks"
    inputs.write()
    train, evaluated = inputs.config.data.train, inputs.config.data.eval["held_out"]
    assert isinstance(train, str)
    assert [json.loads(line) for line in Path(train).read_text().splitlines()] == ROWS
    assert json.loads(Path(evaluated).read_text()) == {"prompt": "3+3:", "gt_answer": 6}
    digest = hashlib.sha256(Path(train).read_bytes()).hexdigest()
    assert train == f"{tmp_path}/run/data/train-{digest[:16]}.jsonl"
    assert Path(evaluated).name.startswith("held_out-")
    stamp = Path(train).stat().st_mtime_ns
    inputs.write()
    assert Path(train).stat().st_mtime_ns == stamp, "an existing file is kept"
    again = read_inputs(None, {"run": tmp_path / "run", "model": "m", "data": data})
    assert again.config == inputs.config, "so the same call resumes the run"


def test_frames_of_pandas_and_iterators_are_rows_and_other_things_are_refused_by_name(tmp_path: Path):
    rows: list[dict[str, Any]] = [*ROWS, {"prompt": "3+3:", "gt_answer": 6, "at": 0.5}]
    for given in (pandas.DataFrame(rows), iter(rows)):
        named = {"run": tmp_path / type(given).__name__, "model": "m", "data": given, "reward": right}
        inputs = read_inputs(None, named)
        inputs.write()
        loaded = load_rows_of(inputs.config, str(inputs.config.data.train)).rows
        assert [{"prompt": row.messages[0]["content"], **row.reward_data} for row in loaded] == rows
    with pytest.raises(DataError, match=r"expected rows that are dicts, got 'a' as row 0; pass .* DataFrame"):
        read_inputs(None, {"run": tmp_path, "model": "m", "data": ["a"]})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": {1, 2}}], "as row 1: JSON has no set"),
        ([{"prompt": "\ud800"}], "as row 0: 'utf-8' codec can't encode"),
    ],
)
def test_rows_that_json_has_not_are_refused_by_number(rows: Any, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=rf"^data\.train: expected rows that are dicts of values.*{message}"):
        read_inputs(None, {"run": tmp_path, "model": "m", "data": rows})
