"""What the doctor says about a machine that shall run programs."""

from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import SandboxError
from async_rl.extensions.code_rewards import checks
from tests.launch.checks.made import made


def of_code(**code: Any) -> Config:
    raw = {"run": {"dir": "run"}, "model": {"path": "m"}, "reward": {"type": "code", "code": code}}
    return parse_config(raw, "the test")


def test_the_sandbox_is_said_to_isolate_programs_only_where_it_must(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "code_reward", lambda config, scale: SimpleNamespace(close=lambda: None))
    for code, state, words in (
        ({}, "OK", "isolated"),
        ({"allow_unsafe": True}, "WARN", "without a sandbox"),
        ({"endpoint": "http://127.0.0.1:1"}, "OK", "the verifier at http://127.0.0.1:1"),
    ):
        (row,) = made(of_code(**code), "sandbox")
        assert (row.state, words in row.found, bool(row.fix)) == (state, True, state == "WARN")


def test_programs_that_cant_be_isolated(monkeypatch: pytest.MonkeyPatch):
    def refuse(config: Config, scale: float) -> Any:
        raise SandboxError("no user namespaces here; run generators elsewhere")

    monkeypatch.setattr(checks, "code_reward", refuse)
    (row,) = made(of_code(), "sandbox", "reward")  # without a sandbox, no row is graded
    assert (row.check, row.state, "namespaces" in row.found) == ("sandbox", "FAIL", True)
