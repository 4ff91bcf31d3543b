"""Output of commands: the result on standard output; progress on standard error, in lines or on one redrawn line."""

from __future__ import annotations

import io
import json
import math

import pytest

from async_rl.output import Progress, print_json
from tests.end_to_end.harness import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_activity_is_a_plain_line_every_few_seconds_without_control_codes():
    stream = io.StringIO()
    with Progress(stream=stream, first_s=0.01, every_s=0.01) as progress:
        progress.show("loading \x1b]0;x\x07", 1200, 3000)
        wait_until("two lines", lambda: stream.getvalue().count("\n") >= 2)
    lines = stream.getvalue().splitlines()
    assert lines[0] == r"loading \x1b]0;x\x07, 1,200 of 3,000 (0 s so far)"
    assert "\x1b" not in stream.getvalue()


def test_an_activity_that_ends_at_once_and_a_quiet_command_write_nothing():
    for quiet in (False, True):
        stream = io.StringIO()
        with Progress(quiet=quiet, stream=stream, first_s=3600.0) as progress:
            progress.show("loading")
            progress.show("")
        assert stream.getvalue() == ""
    with Progress(quiet=True, stream=stream) as progress:
        progress.note("settings: x")
    assert stream.getvalue() == ""


def test_a_terminal_shows_one_line_that_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    with Progress(stream=terminal) as progress:
        progress.show("loading [red]")
        progress.show("answers", 3, 12)
        progress.note("settings: a")
    drawn = terminal.getvalue()
    assert "loading [red]" in drawn
    assert "3 of 12" in drawn
    assert "settings: a\n" in drawn
    assert drawn.endswith("\x1b[2K")  # erases the line
    assert "\x1b[3" not in drawn  # sets no colour


def test_json_is_valid_when_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]):
    print_json({"a": [math.nan, 1.5], "b": {"c": (math.inf, "x")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": [None, "x"]}}
