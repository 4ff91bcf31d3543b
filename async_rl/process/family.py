"""Finds and kills the processes that a process has started, also those in sessions of their own. It works on Linux.

A descendant whose parent has ended belongs to nobody. It is found by a *mark*: an environment variable that was set
when an ancestor began. Elsewhere than on Linux nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAX_ROUNDS = 10


def descendants_of(root: int) -> set[int]:
    """Return the ids of the processes whose parent, or its parent, and so on, is ``root``."""
    children: dict[int, list[int]] = {}
    for pid, stat in _files("stat"):
        with contextlib.suppress(ValueError, IndexError):
            children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(pid)
    descendants: set[int] = set()
    open_pids = [root]
    while open_pids:
        new = set(children.get(open_pids.pop(), ())) - descendants
        descendants |= new
        open_pids += new
    return descendants


def marked_with(variable: str, value: str) -> set[int]:
    """Return the ids of the processes that began with ``variable`` set to ``value``, and of those forked from them.

    This process is left out.
    """
    mark = f"{variable}={value}".encode()
    return {pid for pid, environment in _files("environ") if mark in environment.split(b"\0")} - {os.getpid()}


def kill_marked(variable: str, value: str) -> None:
    """Kill the processes that ``marked_with`` finds, until there are none, as they may start others meanwhile."""
    for _ in range(_MAX_ROUNDS):
        if not (pids := marked_with(variable, value)):
            return
        kill_all(pids)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes. Those that have ended, or belong to others, are left alone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _files(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the id of each process, and the content of its file ``/proc/PID/NAME``. Zombies have no environment."""
    proc = Path("/proc")
    for entry in proc.iterdir() if proc.is_dir() else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
                yield int(entry.name), (entry / name).read_bytes()
