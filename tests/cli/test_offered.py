"""Subcommands that extensions and installed packages offer."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.cli.main import app, main
from async_rl.registry import offers
from tests.packages import install


def test_a_package_offers_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source = (
        "import typer\n"
        "app = typer.Typer()\n"
        "@app.command(short_help='Greet.')\n"
        "def greet(name: str) -> None:\n"
        "    print(f'hello {name}')\n"
    )
    install(tmp_path, "greeting", {"greeting.py": source}, "[async_rl.commands]\ngreet = greeting:app\n", monkeypatch)
    with pytest.raises(SystemExit, match="0"):
        main(["greet", "you"])
    assert capsys.readouterr().out == "hello you\n"
    with pytest.raises(SystemExit, match="0"):
        main(["greet", "--help"])
    assert "completion" not in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        app(["--help"])
    text = capsys.readouterr().out
    assert "Of installed packages:\n  greet       Greet." in text
    assert (len(text.splitlines()) <= 50, text.count(":\n")) == (True, 6), "options, our four groups, packages"


def test_a_broken_package_is_named_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    install(tmp_path, "broken", {"broken.py": "1 / 0\n"}, "[async_rl.commands]\noops = broken:app\n", monkeypatch)
    with pytest.raises(SystemExit, match="0"):
        app(["--help"])
    assert "Can't be loaded" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["oops"])
    said = capsys.readouterr().err
    assert "expected broken:app, which the package broken 1.0 offers as oops (async_rl.commands)" in said
    assert "ZeroDivisionError: division by zero; update or uninstall the package" in said


def test_no_package_replaces_a_command_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "thief", {"thief.py": "1 / 0\n"}, "[async_rl.commands]\nreport = thief:app\n", monkeypatch)
    assert offers("async_rl.commands")["report"].dist is None
