"""Compares the figures that two runs of ``make gpu-smoke`` left: ``python -m benchmarks.baselines compare OLD NEW``.

The exit code is 1 if a time is worse by more than 15 %, or a size by more than 1 %; 2 if nothing can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALLOWED = {"s": 0.15, "bytes": 0.01}
"""By how much a figure may grow, by its unit. Others have a bound in their case and are only shown."""


def read(path: Path) -> dict[str, Any]:
    """Return what ``benchmarks.gpu_smoke`` wrote.

    Raises:
        ValueError: it is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(content["machine"], list) and isinstance(content["figures"], dict)):
            raise TypeError("expected a list of the machine and an object of the figures")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected the JSON file that make gpu-smoke names at its end, got {path}: {type(error).__name__}: {error}"
        ) from error
    return content


def rows(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return for each figure its name, old and new value with unit, the change, and the verdict: empty, ``WORSE`` or
    the file that alone has it.
    """
    found = []
    for name in old | new:
        before, after = old.get(name), new.get(name)
        values = ["" if f is None else f"{f['value']:.4g} {f['unit']}".strip() for f in (before, after)]
        change, verdict = "", "only in OLD" if after is None else "only in NEW"
        if before is not None and after is not None:
            growth = after["value"] / before["value"] - 1 if before["value"] else 0.0
            is_worse = growth > ALLOWED.get(after["unit"], float("inf"))
            change, verdict = f"{growth:+.1%}", "WORSE" if is_worse else ""
        found.append((name, *values, change, verdict))
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print the table. Return the exit code."""
    if old["machine"] != new["machine"]:
        print("machine or versions differ:", *old["machine"], "and", *new["machine"], sep="\n  ")
    table = rows(old["figures"], new["figures"])
    print("| figure | old | new | change | |\n|---|---|---|---|---|")
    print(*(f"| {' | '.join(row)} |" for row in table), sep="\n")
    if not any(change for *_, change, _ in table):
        print("expected figures that both files have, got none; run the same cases", file=sys.stderr)
        return 2
    return int(any(verdict == "WORSE" for *_, verdict in table))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.baselines", description=__doc__)
    parser.add_argument("command", choices=["compare"])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    try:
        return compare(read(options.old), read(options.new))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
