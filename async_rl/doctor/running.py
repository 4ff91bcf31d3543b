"""Runs checks so that none can hang the doctor: each has its own deadline, in a thread or in a process of its own.

A process is for what may never come back, takes the interpreter with it, or leaves much behind: user's code, models,
collectives. Its function is named ``module:function``, takes plain data, and gives rows.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from async_rl.doctor.rows import Row
from async_rl.errors import AsyncRLError
from async_rl.process.child import module_command, package_environment

_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``run`` gives its rows; what it raises becomes a red one."""

    name: str
    run: Callable[[], Sequence[Row]]
    deadline_s: float = 15.0


def run_check(check: Check) -> list[Row]:
    """The check's rows, or one that says that it failed or did not end. A thread that does not end is left behind."""
    found: list[Row] = []

    def work() -> None:
        try:
            found.extend(check.run())
        except AsyncRLError as error:
            found.append(Row(check.name, "FAIL", str(error), fix="as it says"))
        except Exception as error:  # a check's own failure is a finding like any other
            found.append(Row(check.name, "FAIL", f"{type(error).__name__}: {error}", fix="see what it says"))

    thread = threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline_s)
    return [_overdue(check.name, check.deadline_s)] if thread.is_alive() else found


def _overdue(name: str, deadline_s: float) -> Row:
    return Row(
        name, "FAIL", f"did not end within {deadline_s:g} s",
        fix="something that it asks does not answer: a file system, a network, a process; or raise --timeout",
    )  # fmt: skip


class CheckProcess:
    """A check in a process of its own, begun when made; ``rows`` waits for it."""

    def __init__(self, name: str, function: str, arguments: Mapping[str, Any], deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._started = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            module_command("async_rl.doctor.running", function), env=package_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        # Small enough for the pipe, so that a process that never reads can't hold us.
        self._process.stdin.write(json.dumps(arguments).encode())
        self._process.stdin.close()
        self._process.stdin = None

    def rows(self) -> list[Row]:
        """What it found; a red row if it failed, died or did not end in time (it is killed then)."""
        left_s = max(0.1, self._started + self._deadline_s - time.monotonic())
        try:
            said, _ = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            return [_overdue(self._name, self._deadline_s)]
        finally:
            self.close()
        try:
            return [Row.from_plain(plain) for plain in json.loads(said)]
        except ValueError:
            found = f"its process ended with code {self._process.returncode}"
            return [Row(self._name, "FAIL", found, fix="see its last lines below", details=self._last_lines())]

    def close(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_lines(self) -> str:
        self._output.seek(0)
        return "\n".join(self._output.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:])


def _child(function: str) -> None:
    """The process: rows to the standard output that we got, whatever libraries print elsewhere."""
    from async_rl.process.parent_watch import exit_on_sigterm

    exit_on_sigterm()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    arguments = json.load(sys.stdin)
    rows: list[Row] = []
    run_check_rows = getattr(importlib.import_module(module), name)
    try:
        rows.extend(run_check_rows(**arguments))
    except AsyncRLError as error:
        rows.append(Row(arguments.get("check", name), "FAIL", str(error), fix="as it says"))
    json.dump([asdict(row) for row in rows], answer)
    answer.flush()
    # What the check left running, an engine that does not end say, is not waited for.
    os._exit(0)


if __name__ == "__main__":
    _child(sys.argv[1])
