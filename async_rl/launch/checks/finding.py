"""What a check finds: a row of the doctor's table, or the reason for which a start is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from async_rl.errors import AsyncRLError
from async_rl.terminal import visible

State = Literal["OK", "WARN", "FAIL", "skip"]
"""The result of a check. ``skip`` means that the check was not made; ``Finding.found`` says why."""

_BEGINS_WITH_KEY = re.compile(r"[\w.]+: ")
_COLOURS: Mapping[State, str] = {"OK": "green", "WARN": "yellow", "FAIL": "bold red", "skip": "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, shown as one row of the doctor's table.

    Attributes:
        check: the name of the check.
        state: whether the check passed.
        found: what the check found on this machine.
        fix: what the user can do about it. It is empty if ``state`` is OK or skip, or if ``found`` says it.
        details: long text that is printed below the table.
    """

    check: str
    state: State
    found: str
    fix: str = ""
    details: str = ""

    @classmethod
    def of_message(cls, check: str, message: object, state: State = "FAIL") -> Self:
        """Return a finding with an error, or another message. Its last clause, which says what to do, is the fix.

        A message of several lines, or of one clause, is not divided.
        """
        text = str(message)
        found, _, fix = text.rpartition("; ")
        return cls(check, state, found, fix=fix) if found and "\n" not in text else cls(check, state, text)

    @property
    def message(self) -> str:
        """What was found and what to do, in one line that begins with a key or the check's name; below it the details
        of a failure.
        """
        text = self.found if _BEGINS_WITH_KEY.match(self.found) else f"{self.check}: {self.found}"
        text = f"{text}; {self.fix}" if self.fix else text
        return f"{text}\n{self.details}" if self.details and self.state == "FAIL" else text


def made(check: str, make: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return what ``make`` finds, and at last a FAIL of ``check`` with the error of async-rl that it raises, if any."""
    findings: list[Finding] = []
    try:
        findings.extend(make())
    except AsyncRLError as error:
        findings.append(Finding.of_message(check, error))
    return findings


def warnings(check: str, message: str) -> list[Finding]:
    """Return a warning with the ``message`` of ``check``; none if that is empty."""
    return [Finding.of_message(check, message, "WARN")] if message else []


def exit_code(rows: Sequence[Finding]) -> int:
    """Return the doctor's exit code: 1 if a finding in ``rows`` is a FAIL, else 0."""
    return int(any(row.state == "FAIL" for row in rows))


def findings_json(rows: Sequence[Finding]) -> dict[str, Any]:
    """Return plain data: ``ok`` is true if no check failed, and ``rows`` has an object for each finding."""
    return {"ok": not exit_code(rows), "rows": [asdict(row) for row in rows]}


def print_table(rows: Sequence[Finding]) -> None:
    """Print the table of the findings, then their details, then one line with the number of failures and warnings."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(emoji=False)
    table = Table(show_lines=False)
    for column in ("check", "", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for row in (replace(row, found=visible(row.found), fix=visible(row.fix)) for row in rows):
        fix = f"\n[bold]fix:[/bold] {escape(row.fix)}" if row.fix else ""
        table.add_row(escape(row.check), f"[{_COLOURS[row.state]}]{row.state}[/]", escape(row.found) + fix)
    console.print(table)
    for row in rows:
        if row.details:
            console.print(f"{row.check}:", style="bold", markup=False)
            console.print(visible(row.details), markup=False, highlight=False)
    red, yellow = (sum(row.state == state for row in rows) for state in ("FAIL", "WARN"))
    verdict = "no check failed" if not red else f"{red} {'check' if red == 1 else 'checks'} failed"
    console.print(
        verdict + (f", {yellow} {'warning' if yellow == 1 else 'warnings'}" if yellow else ""),
        style="bold red" if red else "bold",
    )
