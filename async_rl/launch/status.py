"""``async-rl status``: what a running queue server says of its run, as JSON or as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from async_rl.errors import AddressError, QueueError
from async_rl.net.keys import ClientKeys
from async_rl.queue.client.learner_client import LearnerQueue


def print_status(address: str, *, as_json: bool, timeout_s: float, keys: ClientKeys | None = None) -> None:
    """Ask once and print.

    Raises:
        AddressError: nobody answers there within ``timeout_s``.
    """
    queue = LearnerQueue(address, timeout_s, keys)
    try:
        status = queue.status()
    except QueueError as error:
        wanted = "is this key in its allowed.txt?" if keys else "if it has keys, pass --keys FILE"
        raise AddressError(
            f"no queue server answers at {address} within {timeout_s:g} s; is the run over? queue.json in its run "
            f"directory has its address; {wanted}"
        ) from error
    finally:
        queue.close()
    if as_json:
        sys.stdout.write(json.dumps(status, indent=2) + "\n")
        return
    console = Console()
    for table in status_tables(status):
        console.print(table)


def status_tables(status: Mapping[str, Any]) -> list[Table]:
    """A table of plain values, one of the generators, one of the ledger's accounts. Leases are only counted.

    Keys that this version knows nothing of are shown as they are; ``--json`` has all of them.
    """
    run = _plain_table("run")
    tables = [run]
    rest = dict(status)
    for name, text in _run_rows(rest):
        run.add_row(name, text)
    for key, value in rest.items():
        if key == "generators" and isinstance(value, list):
            tables.append(_generators_table(value))
        elif isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
            table = _plain_table(str(key))
            for name, account in value.items():
                table.add_row(str(name), _text(account))
            tables.append(table)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            tables.append(_rows_table(str(key), value))
        elif value not in ("", None, []):
            run.add_row(str(key), _text(value))
    return tables


def _run_rows(rest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows that say in one what several keys say; those keys are taken out of ``rest``."""
    if "step" in rest:
        step, num_steps = rest.pop("step"), rest.pop("num_steps", None)
        yield "step", "no learner yet" if step is None else f"{step} of {num_steps}" if num_steps else str(step)
    if announced := rest.pop("announced", None):
        yield "weights", f"version {announced.get('version')} from {announced.get('channel')}"
    if "max_bytes" in rest:
        held, reserved, most = (size_text(rest.pop(key, 0)) for key in ("bytes", "bytes_reserved", "max_bytes"))
        yield "memory", f"{held} held, {reserved} reserved, of {most}"
    if "leases" in rest:
        yield "leases", str(len(rest.pop("leases")))


def _generators_table(generators: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"generators: {len(generators)}", title_justify="left")
    for column in ("id", "host", "version", "busy", "tokens", "tokens/s", "heard of"):
        table.add_column(column, no_wrap=column in ("id", "tokens/s", "heard of"))
    for generator in generators:
        stats = generator.get("stats") or {}
        wall_s, seats = stats.get("wall_s", 0.0), stats.get("seats", 0)
        active, seen_s = generator.get("active"), generator.get("seen_s_ago")
        gone = "" if generator.get("alive", True) else "gone, "
        table.add_row(
            str(generator.get("id", "")),
            str(generator.get("host", "")),
            str(active[1]) if active else "-",
            f"{stats['busy_seat_s'] / (wall_s * seats):.0%} of {seats}" if wall_s and seats else "-",
            f"{stats['num_tokens']:,}" if stats else "-",
            f"{stats['num_tokens'] / wall_s:,.0f}" if wall_s else "-",
            "-" if seen_s is None else f"{gone}{seen_s:.1f} s ago",
        )
    return table


def size_text(num_bytes: float) -> str:
    """``8.5 KiB``, ``2.0 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", show_header=False)


def _rows_table(title: str, rows: list[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(str(column))
    for row in rows:
        table.add_row(*(_cell(column, row.get(column, "")) for column in columns))
    return table


def _cell(column: str, value: Any) -> str:
    return f"{value:.1f}" if column.endswith("_s") and isinstance(value, float) else _text(value)


def _text(value: Any) -> str:
    """A value in short; of a mapping the entries that are not zero."""
    if isinstance(value, Mapping):
        parts = [f"{key} ({_text(v)})" if isinstance(v, Mapping) else f"{key} {_text(v)}" for key, v in _filled(value)]
        return ", ".join(parts) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _filled(mapping: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, v) for key, v in mapping.items() if v and not (isinstance(v, Mapping) and not any(v.values()))]
