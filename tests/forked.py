"""Child processes forked from one that has imported what they need: a start of Python with torch takes seconds.

``preload`` names the modules. Those named before the first child starts are imported once; each child then takes
milliseconds. A child has this process's environment, working directory and import path. ``Forked`` has the methods of
``subprocess.Popen`` that tests need.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Let children find ``modules`` imported. Without effect once the first child has started."""
    _preloaded.extend(modules)
    _CONTEXT.set_forkserver_preload(_preloaded)


class Forked:
    """A child that runs ``target(*arguments)``; its exit code is 0, or as for a program that ends in the same way."""

    def __init__(
        self, target: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        """``target`` is a function of a module. ``environment`` is set in addition to this process's."""
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  (for the life of this)
        paths = [f"/proc/{os.getpid()}/fd/{output.fileno()}" for output in self._outputs]
        variables = {**os.environ, **(environment or {})}
        self._process = _CONTEXT.Process(target=_run, args=(paths, variables, target, arguments), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to stdout and to stderr, once it has ended."""
        self.wait(timeout)
        for output in self._outputs:
            output.seek(0)
        stdout, stderr = (output.read() for output in self._outputs)
        return stdout, stderr

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(paths: list[str], variables: Mapping[str, str], target: Callable[..., Any], arguments: tuple[Any]) -> None:
    for fd, path in enumerate(paths, start=1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    target(*arguments)
