"""Code of the user's own: named, allowed by each machine for itself, and the same everywhere by digest."""

import hashlib
import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml, load_config, parse_config
from async_rl.errors import ConfigError, QueueError
from async_rl.generator.start.backends import build_backend
from async_rl.generator.start.rollouts import RolloutSetup, open_rollouts
from async_rl.generator.start.worker import build_grader, generator_config
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

MINIMAL = {"run": {"dir": "r"}, "model": {"path": "m"}}
SOURCE = "def one(item):\n    return 1.0\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("name", ["a:b", "a.b.c:d", "./a.py:f", "/x/a-b.py:f", "my rewards/a.py:f"])
def test_names_of_code(name: str):
    assert is_code_name(name)


@pytest.mark.parametrize("name", ["a", "a:", ":b", "a:b:c", "a.:b", "a:b.c", "a b:c", "1:a", "a:b()", "tcp://a:1", ""])
def test_what_is_no_name_of_code(name: str):
    assert not is_code_name(name)


@pytest.mark.parametrize("name", ["a", "a.b", "./a.py", "my games/a.py", "a.py:f", "a.b:C"])
def test_an_environment_may_be_a_whole_module(name: str):
    assert is_code_name(name, needs_attribute=False)


@pytest.mark.parametrize("name", [":x", "a b", "mine.py:", "mine.py:not an identifier", "a..b", "dir/module", ""])
def test_other_forms_of_a_name_are_none(name: str):
    assert not is_code_name(name, needs_attribute=False)
    if name:
        with pytest.raises(ConfigError, match=r"environment\.name: expected file\.py, file\.py:name, module"):
            parse_config({**MINIMAL, "environment": {"name": name}}, "test")


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


def test_the_digest_is_of_the_source_file(source: Path):
    assert code_digests([f"{source}:one"]) == {f"{source}:one": hashlib.sha256(SOURCE.encode()).hexdigest()}


def test_without_an_attribute_the_module_is_meant_and_it_replaces_no_other(tmp_path: Path):
    path = tmp_path / "json.py"
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 3\n")
    assert load_code(str(path), allowed=(str(path),), digest=None).A().x == 3
    assert load_code(f"{path}:A", allowed=(str(path),), digest=None)().x == 3
    assert not hasattr(json, "A")


def test_an_installed_module_comes_before_one_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "json.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_code("json:dumps", allowed=("json",), digest=None)([]) == "[]"


def test_a_module_is_found_in_the_working_directory(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(source.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_code("mine:one", allowed=("mine",), digest=None)(None) == 1.0
    monkeypatch.delitem(sys.modules, "mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_anywhere:one", "expected a module no_such_module_anywhere on this machine"),
        ("/nowhere/mine.py:one", "expected a file /nowhere/mine.py on this machine"),
        ("absent.py", "expected a file .*absent.py on this machine"),
        (
            "absent_8731.sub:one",
            "expected a module absent_8731.sub on this machine, but there is none; install it, add",
        ),
        ("sys:exit", "expected a module with a Python source file, got built-in"),
    ],
)
def test_code_that_is_not_there_is_named(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        code_digests([name])


def test_a_package_that_lacks_another_module_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "needs_8731").mkdir()
    (tmp_path / "needs_8731" / "__init__.py").write_text("import absent_8731\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"can't find module needs_8731\.sub: .*No module named 'absent_8731'; correct"
    ):
        code_digests(["needs_8731.sub:one"])


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
    raw = {**MINIMAL, "reward": {"type": f"{source}:one"}, "generator": {"allow_code": [str(source)]}}
    return parse_config(raw, "test")


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
    raw = {**MINIMAL, "environment": {"name": f"{source}:one", "rows": 1}}
    config = parse_config(raw, "test")
    assert config.code_names == (f"{source}:one",)
    with pytest.raises(ConfigError, match="this machine does not allow it"):
        check_code(config)
    check_code(parse_config({**raw, "generator": {"allow_code": [str(source)]}}, "test"))
    check_code(parse_config({**raw, "generator": {"count": 0}}, "test"))


def test_a_generator_plays_only_the_environment_that_the_learner_has(source: Path, tmp_path: Path):
    raw = {"environment": {"name": str(source)}, "generator": {"backend": "fake", "allow_code": [str(source)]}}
    config = parse_config({**MINIMAL, **raw}, "test")
    backend = build_backend(config, tmp_path)
    with ExitStack() as stack:
        grader = build_grader(config, {}, stack)
        for digests, message in (
            ({}, "sent no digest"),
            ({str(source): "0" * 64}, "expected the learner's source, SHA-256 0000"),
            (code_digests([str(source)]), "to have a function step"),
        ):
            with (
                pytest.raises(ConfigError, match=message),
                open_rollouts(RolloutSetup(config, backend, grader, tmp_path, digests)),
            ):
                pass


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


def test_an_error_without_user_code_is_described_by_its_text(tmp_path: Path):
    with pytest.raises(ConfigError) as failed:
        load_config(tmp_path / "nothing.toml")
    frames = failed.value.__traceback__
    assert frames is not None
    failed.value.__traceback__ = frames.tb_next  # without the frame of this test
    sentence, place = describe_error(failed.value)
    assert sentence == f"ConfigError: {failed.value}"
    assert re.fullmatch(r"ConfigError at .*async_rl/config/loading\.py:\d+", place)
