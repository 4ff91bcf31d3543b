"""Code of the user's own: named, allowed by each machine for itself, and the same everywhere by digest."""

import json
import sys
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.errors import ConfigError, QueueError
from async_rl.generator.start.worker import generator_config
from async_rl.launch.checks.rewards import check_code
from async_rl.process.user_code import (
    changed_code,
    check_allowed,
    code_digests,
    describe_error,
    is_code_name,
    load_code,
    read_digests,
    stored_digests,
    write_digests,
)
from async_rl.rewards.registry import build_reward
from tests.config.made import a_config

SOURCE = "def one(item):\n    return 1.0\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("name", "is_name", "is_name_of_a_module"),
    [
        *((name, True, True) for name in ("a:b", "a.b.c:d", "./a.py:f", "/x/a-b.py:f", "my rewards/a.py:f")),
        *((name, False, True) for name in ("a", "a.b", "./a.py", "my games/a.py")),
        *((name, False, False) for name in ("a:", ":b", "a:b:c", "a.:b", "a:b.c", "a b:c", "1:a", "a:b()", "", "a b")),
        *((name, False, False) for name in ("tcp://a:1", "mine.py:", "a..b", "dir/module", "mine.py:not one")),
    ],
)
def test_names_of_code(name: str, is_name: bool, is_name_of_a_module: bool):
    assert is_code_name(name) == is_name
    assert is_code_name(name, needs_attribute=False) == is_name_of_a_module
    if name and not is_name_of_a_module:
        with pytest.raises(ConfigError, match=r"environment\.name: expected file\.py, file\.py:name, module"):
            a_config(environment={"name": name})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_anywhere:one", "expected a module no_such_module_anywhere on this machine"),
        ("absent_8731.sub:one", "expected a module absent_8731.sub on this machine, .* install it, add"),
        ("/nowhere/mine.py:one", "expected a file /nowhere/mine.py on this machine"),
        ("sys:exit", "expected a module with a Python source file, got built-in"),
    ],
)
def test_code_that_is_not_there_is_named(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        code_digests([name])


def test_code_is_run_only_where_it_is_allowed(source: Path):
    name = f"{source}:one"
    with pytest.raises(ConfigError, match=r"this machine does not allow it; .* generator.allow_code = \["):
        load_code(name, allowed=(), digest=None)
    with pytest.raises(ConfigError, match="does not allow it"):
        load_code("os:system", allowed=(str(source),), digest=None)
    assert load_code(name, allowed=(str(source),), digest=None)(None) == 1.0
    check_allowed([], ())


def test_nothing_of_a_module_that_is_not_allowed_is_run(tmp_path: Path):
    path = tmp_path / "rude.py"
    path.write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')\ndef one(item): return 1.0\n")
    digests = code_digests([f"{path}:one"])
    for allowed, digest in (((), None), ((str(path),), "0" * 64)):
        with pytest.raises(ConfigError):
            load_code(f"{path}:one", allowed=allowed, digest=digest)
    assert not (tmp_path / "was_here").exists()
    load_code(f"{path}:one", allowed=(str(path),), digest=digests[f"{path}:one"])
    assert (tmp_path / "was_here").exists()


def test_without_an_attribute_the_module_is_meant_and_it_replaces_no_other(tmp_path: Path):
    path = tmp_path / "json.py"
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 3\n")
    assert load_code(str(path), allowed=(str(path),), digest=None).A().x == 3
    assert load_code(f"{path}:A", allowed=(str(path),), digest=None)().x == 3
    assert not hasattr(json, "A")


def test_a_module_is_found_in_the_working_directory(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(source.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_code("mine:one", allowed=("mine",), digest=None)(None) == 1.0
    monkeypatch.delitem(sys.modules, "mine")


def test_code_that_fails_to_be_imported_is_named(source: Path):
    with pytest.raises(ConfigError, match=r"to define 'two'"):
        load_code(f"{source}:two", allowed=(str(source),), digest=None)
    broken = source.with_name("broken.py")
    broken.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"importing .*broken.py failed: ZeroDivisionError"):
        load_code(f"{broken}:one", allowed=(str(broken),), digest=None)


def test_digests_are_recorded_in_the_run_and_tell_what_has_changed(source: Path, tmp_path: Path):
    name = f"{source}:one"
    content = write_digests(tmp_path, [name])
    assert read_digests(content) == code_digests([name])
    assert (tmp_path / "code_digests.json").read_bytes() == content
    assert write_digests(tmp_path, [name]) == content
    before = stored_digests(tmp_path)
    assert changed_code(before, [name]) == {}
    source.write_text(SOURCE + "# changed\n")
    assert changed_code(before, [name]) == {name: (before[name][:16], code_digests([name])[name][:16])}
    assert changed_code({}, [name]) == {}


@pytest.mark.parametrize("damaged", [b"", b'{"reward": "ab', b"[1]"])
def test_damaged_digests_in_the_run_directory_are_said_and_replaced(
    damaged: bytes, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "code_digests.json"
    path.write_bytes(damaged)
    assert stored_digests(tmp_path) == {}
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() != write_digests(tmp_path, [f"{source}:one"]) == path.read_bytes()


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"a": 1}', b"\xff"])
def test_malformed_digests_are_refused(content: bytes):
    with pytest.raises(QueueError, match=r"code_digests\.json"):
        read_digests(content)
    assert read_digests(None) == {}


def named(source: Path) -> Config:
    return a_config(reward={"type": f"{source}:one"}, generator={"allow_code": [str(source)]})


def test_a_generator_allows_only_what_its_own_operator_allowed(source: Path):
    config = named(source)
    sent = config_to_toml(config)
    assert generator_config(sent, []).generator.allow_code == ()
    own = [f"generator.allow_code={json.dumps([str(source)])}"]
    assert generator_config(sent, own).generator.allow_code == (str(source),)


def test_a_generator_runs_only_the_source_that_the_learner_has(source: Path):
    config, name = named(source), f"{source}:one"
    with pytest.raises(ConfigError, match="sent no digest"):
        build_reward(config, code_digests={})
    with pytest.raises(ConfigError, match="expected the learner's source, SHA-256 0000"):
        build_reward(config, code_digests={name: "0" * 64})
    build_reward(config, code_digests=code_digests([name]))


def test_environments_and_rewards_are_code_by_one_rule(source: Path):
    environment = {"name": f"{source}:one", "rows": 1}
    config = a_config(environment=environment)
    assert config.code_names == (f"{source}:one",)
    with pytest.raises(ConfigError, match="this machine does not allow it"):
        check_code(config)
    check_code(a_config(environment=environment, generator={"allow_code": [str(source)]}))
    check_code(a_config(environment=environment, generator={"count": 0}))


def test_an_error_of_user_code_is_described_by_its_file_and_line(tmp_path: Path):
    source = tmp_path / "my_reward.py"
    source.write_text("import json\n\ndef score(text):\n    return json.loads(text)['answer']\n")
    score = load_code(f"{source}:score", allowed=[str(source)], digest=None)
    described = []
    for text in ("[", "x1", "{}"):
        with pytest.raises((ValueError, KeyError)) as failed:
            score(text)
        described.append(describe_error(failed.value))
    (first, place), (second, same), (third, other) = described
    where = f"({source}, line 4, in score: return json.loads(text)['answer'])"
    assert (first, second) == (
        f"JSONDecodeError: Expecting value: line 1 column 2 (char 1) {where}",
        f"JSONDecodeError: Expecting value: line 1 column 1 (char 0) {where}",
    )
    assert third == f"KeyError: 'answer' {where}"
    assert place == same == f"JSONDecodeError at {source}:4"
    assert other == f"KeyError at {source}:4"
