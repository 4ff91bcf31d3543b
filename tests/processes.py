"""What Linux says of a process."""

from __future__ import annotations

import select
from pathlib import Path


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent_of(pid: int) -> int:
    """0 if there is no such process any more."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def anonymous_bytes(pid: int) -> int:
    """The resident memory of the process that no file has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def wait_until_ended(pidfd: int, timeout_s: float = 60.0) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])
