"""Finds and kills the processes that a process has started, also those in sessions of their own.

A descendant whose parent has ended belongs to nobody. It is found by a *mark*: an environment variable that was set
when an ancestor began. Elsewhere than on Linux no mark is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

_MAX_ROUNDS = 10


def descendants_of(root: int) -> set[int]:
    """Return the ids of the processes whose parent, or its parent, and so on, is ``root``."""
    try:
        return {process.pid for process in psutil.Process(root).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def marked_with(variable: str, value: str) -> set[int]:
    """Return the ids of the processes that began with ``variable`` set to ``value``, and of those forked from them.

    This process is left out.
    """
    mark, found = f"{variable}={value}".encode(), set[int]()
    for pid in psutil.pids():
        # psutil's own reading of an environment takes three times as long, and fork servers wait for this.
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found - {os.getpid()}


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
