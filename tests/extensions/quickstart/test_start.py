"""``async-rl quickstart``: what it refuses, and what the user must type first. A whole one: ``end_to_end``."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from async_rl.extensions.quickstart.start import measured_gain, path_lines
from tests.extensions.insight.runs import a_run
from tests.refusal import refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "queue.max_stalenes=1"], "queue.max_stalenes: unknown key"),
        (["--compare", "--set", "queue.max_staleness=0"], "--compare: expected queue.max_staleness above 0"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_made(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, "quickstart", *arguments)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["quickstart.toml"]


def test_a_shell_that_does_not_find_the_command_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripts = tmp_path / "new environment" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts))
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert path_lines() == []  # run from the checkout: there is no such command
    (scripts / "async-rl").touch(mode=0o755)
    line = f"first: export PATH='{scripts}':\"$PATH\"    # so that this shell finds async-rl"
    assert path_lines() == [line]
    monkeypatch.setenv("PATH", str(scripts))
    assert path_lines() == []
    monkeypatch.setenv("UV", "/usr/bin/uv")  # `uv tool run` changed the path, and for this process only
    assert path_lines() == [line]


def test_the_measured_gain_is_the_ratio_of_the_speeds(tmp_path: Path):
    # 2 and 1.25 steps/s.
    assert measured_gain(a_run(tmp_path / "run", 4, 0.5), a_run(tmp_path / "run-on-policy", 0, 0.8)) == (
        "what asynchrony gained: 2 steps/s instead of 1.25 at queue.max_staleness = 0, 1.60 times as many"
    )
