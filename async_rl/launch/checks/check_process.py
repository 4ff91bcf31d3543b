"""Make a check in a process of its own, because it may hang, crash the interpreter, print or keep much memory."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from async_rl.launch.checks.finding import Finding, made
from async_rl.process.child import module_command, package_environment

_LAST_LINES = 3


class CheckProcess:
    """A check that runs in a separate process. The constructor starts the process; ``findings`` waits for its end.

    Args:
        name: the name of the check in the findings.
        function: the function to run, as ``module:function``. It returns findings.
        arguments: the keyword arguments of the function. They must be JSON data.
        deadline_s: seconds after the start at which the process is killed.
        overdue: what is found then. None: a FAIL.
        what: the process, in the finding about its death.
        fix: what to do about that.
    """

    def __init__(
        self, name: str, function: str, arguments: Mapping[str, Any], deadline_s: float, *,
        overdue: Finding | None = None, what: str = "the process of this check",
        fix: str = "see the last lines of its output below",
    ) -> None:  # fmt: skip
        self._name, self._deadline_s, self._what, self._fix = name, deadline_s, what, fix
        self._overdue = overdue or overdue_finding(name, deadline_s)
        self._started = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        with tempfile.TemporaryFile() as given:
            given.write(msgspec.json.encode(arguments))
            given.seek(0)
            self._process = subprocess.Popen(
                module_command("async_rl.launch.checks.check_process", function), env=package_environment(),
                stdin=given, stdout=subprocess.PIPE, stderr=self._output, start_new_session=True,
            )  # fmt: skip

    def findings(self) -> list[Finding]:
        """Wait until the process ends and return its findings.

        Return ``overdue`` if it was killed at its time limit, and a FAIL if it died without findings.
        """
        left_s = max(0.1, self._started + self._deadline_s - time.monotonic())
        try:
            output, _ = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            return [self._overdue]
        finally:
            self.close()
        try:
            return msgspec.json.decode(output, type=list[Finding])
        except ValueError:
            text = f"{self._what} ended with exit code {self._process.returncode}"
            return [Finding(self._name, "FAIL", text, self._fix, self._last_lines())]

    def close(self) -> None:
        """Kill the process of the check and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_lines(self) -> str:
        self._output.seek(0)
        return "\n".join(self._output.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:])


def overdue_finding(name: str, deadline_s: float) -> Finding:
    """Return the finding about a check that was given up at its time limit."""
    return Finding(
        name, "FAIL", f"did not end within {deadline_s:g} s",
        fix="look for a file system, a network or a process that does not answer; for data, model, reward and parity "
        "you may also raise --timeout",
    )  # fmt: skip


def _child(function: str) -> None:
    """Run one check in this process, which ``CheckProcess`` has started.

    ``function`` is ``module:function``. Read its arguments as JSON from standard input, and write its findings as JSON
    to standard output. Output that libraries print goes to standard error instead, so that it can't damage the JSON.
    """
    from async_rl.process.child import exit_on_sigterm

    exit_on_sigterm()
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    arguments = json.load(sys.stdin)
    check = getattr(importlib.import_module(module), name)
    findings = made(arguments.get("check", name), lambda: check(**arguments))
    answer.write(msgspec.json.encode(findings))
    answer.flush()
    # Do not wait for what the check left running, such as an engine's threads.
    os._exit(0)


if __name__ == "__main__":
    _child(sys.argv[1])
