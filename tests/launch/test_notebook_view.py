"""The live table in a notebook: one output of the cell, which is replaced; the lines are plain text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from async_rl.launch.live_view import LiveView
from async_rl.launch.supervisor import ProcessStatus
from async_rl.output import in_notebook, new_console


class Cell:
    """What the cell shows: the bundles of its one output that is replaced, in order."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool = False) -> Cell:
        assert raw
        assert display_id, "else it could not be replaced"
        self.update(bundle, raw=raw)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle["text/plain"])


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display))
    return cell


def test_a_notebook_shows_one_table_that_is_replaced_and_lines_as_text(
    cell: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels do
    assert in_notebook()
    metrics = tmp_path / "metrics.jsonl"
    view = LiveView(new_console(), metrics, 10)
    view.refresh([ProcessStatus("queue", "running", 0)])
    metrics.write_text(json.dumps({"step": 3, "version": 3, "tokens/trained": 7, "time_s": 2.0}) + "\n")
    view.note("queue server at tcp://127.0.0.1:5")
    view.close()
    first, last = cell.shown
    assert "0/10" in first
    assert "queue: running" in first
    assert "3/10" in last
    assert "\x1b" not in first + last
    assert capsys.readouterr().out == "queue server at tcp://127.0.0.1:5\n"


def test_a_terminal_is_no_notebook_even_with_ipython(monkeypatch: pytest.MonkeyPatch):
    for shell in (None, SimpleNamespace()):  # no IPython shell, or that of a terminal
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert not in_notebook()
