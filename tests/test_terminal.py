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
from async_rl.terminal import VisibleFormatter, visible

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


@pytest.mark.parametrize(("markup", "shown"), [("[/red]x:skull:", "[/red]x:skull:"), (ATTACK, "owned")])
def test_what_others_wrote_is_shown_as_it_is_and_acts_on_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, markup: str, shown: str
):
    monkeypatch.setenv("COLUMNS", "400")
    status: dict[str, Any] = {
        "run_id": markup,
        "generators": [{"id": markup, "host": f"host {markup}", "seen_s_ago": 1.0, "trouble": markup}],
        "waits": [{"who": markup, "for": markup, "since_s": 100.0}],
        "ledger": {"groups": {"dropped": {markup: 3}}, "eval": {markup: {"issued": 1}}},
        "unknown": [{markup: markup}],
        markup: markup,
    }
    print_status(status)
    print_table([Finding("model", "FAIL", markup, fix=markup, details=markup)])
    printed = capsys.readouterr().out
    assert printed.count(shown) == 13 + 3
    print_json(status)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, f"eval/{markup}/accuracy": 0.5}) + "\n")
    output = io.StringIO()
    view = LiveView(Console(file=output, width=400, markup=False, emoji=False), tmp_path / "metrics.jsonl", 1)
    view.note(markup)
    view.close()
    assert output.getvalue().count(shown) == 2
    plain = io.StringIO()
    console = Console(file=plain, width=400, markup=False, emoji=False)
    PlainView(console, tmp_path / "metrics.jsonl", 1).note(f"eval {markup}")
    assert shown in plain.getvalue()
    for text in (printed, capsys.readouterr().out, plain.getvalue()):
        assert not set("\x1b\x07\u202e\r\x9b") & set(text)


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
