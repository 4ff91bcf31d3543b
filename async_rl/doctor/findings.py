"""What checks found, as plain data: printed as a table or as JSON. Each has a fix if something is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["OK", "WARN", "FAIL", "skip"]
"""``skip``: not checked, and ``found`` says why."""

_COLOURS: Mapping[State, str] = {"OK": "green", "WARN": "yellow", "FAIL": "bold red", "skip": "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Attributes:
        check: name of what was checked.
        fix: what to do; set for every FAIL and WARN.
        details: long text, printed below the table.
    """

    check: str
    state: State
    found: str
    fix: str = ""
    details: str = ""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Finding:
        """Build it from what ``asdict`` returned."""
        return cls(**plain)


def exit_code(rows: Sequence[Finding]) -> int:
    """1 if a check failed, else 0."""
    return int(any(row.state == "FAIL" for row in rows))


def print_json(rows: Sequence[Finding]) -> None:
    """Print one object: ``ok``, and ``rows`` with an object for each finding."""
    plain = {"ok": not exit_code(rows), "rows": [asdict(row) for row in rows]}
    sys.stdout.write(json.dumps(plain, indent=2) + "\n")


def print_table(rows: Sequence[Finding]) -> None:
    """Print the table, then the details, then one line with the verdict."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(show_lines=False)
    for column in ("check", "", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for row in rows:
        fix = f"\n[bold]fix:[/bold] {escape(row.fix)}" if row.fix else ""
        table.add_row(escape(row.check), f"[{_COLOURS[row.state]}]{row.state}[/]", escape(row.found) + fix)
    console.print(table)
    for row in rows:
        if row.details:
            console.print(f"{row.check}:", style="bold")
            console.print(row.details, markup=False, highlight=False)
    red, yellow = (sum(row.state == state for row in rows) for state in ("FAIL", "WARN"))
    verdict = "no check failed" if not red else f"{red} {'check' if red == 1 else 'checks'} failed"
    console.print(
        verdict + (f", {yellow} {'warning' if yellow == 1 else 'warnings'}" if yellow else ""),
        style="bold red" if red else "bold",
    )
