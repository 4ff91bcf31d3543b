"""Code that a config names: found, loaded, and known by its digest."""

from __future__ import annotations

import hashlib
import sys
import tomllib

import pytest

from async_rl.config_file import config_to_toml, load_config, parse_config
from async_rl.errors import ConfigError
from async_rl.named_code import check_digest, load_code, source_digest, split_name

CONFIG = """
[run]
dir = "run"
[model]
path = "model"
[environment]
name = "mine.py"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_file_and_its_attribute_are_loaded(tmp_path):
    (tmp_path / "json.py").write_text("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 3\n")
    assert load_code("json.py:A", "key")().x == 3
    assert load_code("json.py", "key").A().x == 3
    import json

    assert not hasattr(json, "A")


def test_a_module_is_found_last_in_the_working_directory(tmp_path):
    (tmp_path / "only_here_8731.py").write_text("value = 5\n")
    (tmp_path / "json.py").write_text("1 / 0\n")
    assert load_code("only_here_8731:value", "key") == 5
    assert load_code("json:dumps", "key")([]) == "[]"


def test_the_digest_is_that_of_the_source(tmp_path):
    source = b"value = 5\n"
    (tmp_path / "mine.py").write_bytes(source)
    expected = hashlib.sha256(source).hexdigest()
    assert source_digest("mine.py:value", "key") == source_digest("mine", "key") == expected
    check_digest("mine.py", expected, "key")
    with pytest.raises(ConfigError, match=r"key: mine.py is not the run's mine.py: expected SHA-256 0000"):
        check_digest("mine.py", "0" * 64, "key")


@pytest.mark.parametrize("name", ["", ":x", "a b", "mine.py:", "mine.py:not an identifier", "a..b", "dir/module"])
def test_other_forms_of_a_name_are_refused(name):
    with pytest.raises(ConfigError, match=r"key: expected file.py, file.py:name, module or module:name"):
        split_name(name, "key")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.py", "no file absent.py"),
        ("absent_8731", "no Python module absent_8731"),
        ("absent_8731.sub", "can't import absent_8731.sub"),
        ("mine.py:absent", "has no 'absent'"),
    ],
)
def test_what_is_not_there_is_told_with_the_key(tmp_path, name, told):
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(ConfigError, match=rf"environment.name: .*{told}"):
        load_code(name, "environment.name")


def test_a_config_carries_the_digest_of_the_code_it_names(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"environment.name: no file mine.py"):
        load_config("run.toml")
    (tmp_path / "mine.py").write_text("async def step(state, action, extra_info): ...\n")
    config = load_config("run.toml")
    assert config.environment.digest == source_digest("mine.py", "key")
    assert parse_config(tomllib.loads(config_to_toml(config)), "test") == config
    # A resolved config names the code as it was: another one is not taken for it.
    (tmp_path / "resolved.toml").write_text(config_to_toml(config))
    (tmp_path / "mine.py").write_text("async def step(state, action, extra_info): return 1\n")
    with pytest.raises(ConfigError, match="is not the run's"):
        load_config("resolved.toml")


def test_an_environment_must_answer_before_its_lease_expires():
    raw = {
        "run": {"dir": "run"},
        "model": {"path": "model"},
        "environment": {"name": "mine.py", "timeout_s": 20.0},
        "queue": {"lease_timeout_s": 20.0},
    }
    with pytest.raises(ConfigError, match=r"environment.timeout_s: expected less than queue.lease_timeout_s = 20"):
        parse_config(raw, "test")
