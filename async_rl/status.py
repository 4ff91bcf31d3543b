"""``async-rl status``: what a running queue server says of its run, as JSON or as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from async_rl.errors import AddressError, QueueError
from async_rl.queue.client import LearnerQueue


def print_status(address: str, *, as_json: bool, timeout_s: float) -> None:
    """Ask once and print.

    Raises:
        AddressError: nobody answers there within ``timeout_s``.
    """
    queue = LearnerQueue(address, timeout_s=timeout_s)
    try:
        status = queue.status()
    except QueueError as error:
        raise AddressError(f"no queue server answers at {address} within {timeout_s:g} s: {error}") from None
    finally:
        queue.close()
    if as_json:
        sys.stdout.write(json.dumps(status, indent=2) + "\n")
        return
    console = Console()
    for table in status_tables(status):
        console.print(table)


def status_tables(status: Mapping[str, Any]) -> list[Table]:
    """A table of plain values, one of the ledger's accounts, one a list of members. Leases are only counted."""
    run = _plain_table("run")
    tables = [run]
    for key, value in status.items():
        if key == "leases":
            run.add_row("leases", str(len(value)))
        elif isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
            table = _plain_table(str(key))
            for name, account in value.items():
                table.add_row(str(name), _text(account))
            tables.append(table)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            tables.append(_rows_table(str(key), value))
        else:
            run.add_row(str(key), _text(value))
    return tables


def _plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", show_header=False)


def _rows_table(title: str, rows: list[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(str(column))
    for row in rows:
        table.add_row(*(_text(row.get(column, "")) for column in columns))
    return table


def _text(value: Any) -> str:
    """A value in short; of a mapping the entries that are not zero."""
    if isinstance(value, Mapping):
        parts = [f"{key} ({_text(v)})" if isinstance(v, Mapping) else f"{key} {_text(v)}" for key, v in _filled(value)]
        return ", ".join(parts) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _filled(mapping: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, v) for key, v in mapping.items() if v and not (isinstance(v, Mapping) and not any(v.values()))]
