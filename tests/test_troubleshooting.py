"""docs/troubleshooting.md: what it says that a run says is in the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from async_rl.run.figures.health import CAUSES

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADER = "| you see | the run says | cause | do |"


def rows() -> Iterator[list[str]]:
    """The cells of each row of each table with ``HEADER``."""
    for table in PAGE.split(HEADER)[1:]:
        for line in table.strip().splitlines()[1:]:
            if not line.startswith("|"):
                break
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


ROWS = list(rows())


@cache
def texts() -> tuple[str, ...]:
    """All texts of the program. What an f-string inserts is a NUL character."""
    found: list[str] = []
    for path in (ROOT / "async_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_what_the_page_says_that_a_run_says_is_in_the_program(row: list[str]):
    symptom, says, cause, remedy = row
    assert symptom
    assert cause
    assert remedy
    pattern = re.compile("[^\0]*\0.*?".join(map(re.escape, says.split("..."))), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), f"no text of the program is like {says!r}"


def test_every_cause_that_is_noted_of_the_training_has_a_row():
    assert {cause.finding for cause in CAUSES} <= {says for _, says, _, _ in ROWS}
