"""Nothing that others wrote acts on the user's terminal: not in tables, not in lines, not in logs."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from async_rl.cli.main import main
from async_rl.launch.checks.finding import Finding, print_table
from async_rl.launch.live_view import LiveView, PlainView
from async_rl.launch.status import print_status
from async_rl.output import print_json
from async_rl.terminal import VisibleFormatter, visible, visible_values

ATTACK = "\x1b]0;owned\x07\x1b[2J\u202egen\r\x9b31m"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\u202egen\\r\\x9b31m"
ROOT = Path(__file__).resolve().parents[1]


def test_control_characters_are_shown_and_everything_else_stays():
    assert visible(ATTACK) == SHOWN
    assert visible("step 1\n\tR\u00e9ponse: 5 \u20ac, \u4f60\u597d, [bold]") == (
        "step 1\n\tR\u00e9ponse: 5 \u20ac, \u4f60\u597d, [bold]"
    )


@given(st.text())
def test_any_text_is_harmless_once_it_is_visible(text: str):
    shown = visible(text)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown.replace("\n", "").replace("\t", ""))
    assert visible(shown) == shown


def test_maps_and_lists_are_shown_with_their_keys():
    assert visible_values({ATTACK: [1, (ATTACK, None)], "b": True}) == {SHOWN: [1, [SHOWN, None]], "b": True}


def test_status_tables_show_what_a_generator_is_called(capsys: pytest.CaptureFixture[str]):
    status: dict[str, Any] = {
        "run_id": ATTACK,
        "generators": [{"id": f"[red]{ATTACK}", "host": ATTACK, "seen_s_ago": 1.0}],
        "waits": [{"who": ATTACK, "for": "take", "since_s": 1.0}],
        "unknown": [{ATTACK: ATTACK}],
    }
    print_status(status)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "\u202e" not in printed
    assert "[red]" in printed
    print_json(status)
    assert "\x1b" not in capsys.readouterr().out


def test_markup_in_what_others_wrote_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    markup = "[/red]x:skull:"
    status: dict[str, Any] = {
        "run_id": markup,
        "generators": [{"id": markup, "host": f"host {markup}", "seen_s_ago": 1.0, "trouble": markup}],
        "waits": [{"who": markup, "for": markup, "since_s": 100.0}],
        "ledger": {"groups": {"dropped": {markup: 3}}, "eval": {markup: {"issued": 1}}},
        "unknown": [{markup: markup}],
        markup: markup,
    }
    print_status(status)
    assert capsys.readouterr().out.count("[/red]x:skull:") == 13
    print_table([Finding(markup, "FAIL", markup, fix=markup, details=markup)])
    assert capsys.readouterr().out.count("[/red]x:skull:") == 5
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, f"eval/{markup}/accuracy": 0.5}) + "\n")
    output = io.StringIO()
    view = LiveView(Console(file=output, width=200, markup=False, emoji=False), tmp_path / "metrics.jsonl", 1)
    view.note(markup)
    view.close()
    assert output.getvalue().count("[/red]x:skull:") == 2


def test_lines_of_a_run_and_findings_of_doctor_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = io.StringIO()
    view = PlainView(Console(file=output, width=200), tmp_path / "metrics.jsonl", 1)
    view.note(f"eval {ATTACK}")
    assert output.getvalue() == f"eval {SHOWN}\n"
    print_table([Finding("model", "FAIL", ATTACK, fix=ATTACK, details=ATTACK)])
    assert "\x1b]0" not in capsys.readouterr().out


def test_errors_and_logs_are_shown(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["config", ATTACK])
    assert exit_.value.code == 2
    assert "\x1b" not in capsys.readouterr().err
    record = logging.LogRecord("queue", logging.WARNING, __file__, 1, "generator %s left", (ATTACK,), None)
    assert VisibleFormatter("%(message)s").format(record) == f"generator {SHOWN} left"


def test_the_roles_log_visibly():
    program = (
        "import logging\nfrom async_rl.terminal import log_visibly\nlog_visibly(logging.INFO, '%(message)s')\n"
        f"logging.getLogger('x').info({ATTACK!r})\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stderr == f"{SHOWN}\n"
