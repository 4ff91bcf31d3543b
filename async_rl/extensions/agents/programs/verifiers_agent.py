"""The agent of ``environment.name = "verifiers:TASKSET"``: another Python plays the rollouts with ``verifiers``.

verifiers pins versions that this package can't live with, so this Python never imports it. The fork server starts one
process of ``environment.python`` for all rollouts of its generator (``Taskset.prepare``), with ``verifiers_program``.
Each rollout has a process of the pool like any other agent's, which only waits: it sends the program one end of a
connection, and on it the endpoint and the row. The program belongs to the fork server, so no rollout leaves it behind,
and it ends with the fork server. If it has died, the fork server must end, too: the pool then starts both anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from async_rl.environments.protocol import Task
from async_rl.extensions.agents.programs.verifiers_program import DIGEST, TASK

_PROGRAM = Path(__file__).with_name("verifiers_program.py")
_MAX_BYTES = 64 << 20
_PASSING = ("SandboxError", "InterceptionError", "TunnelError")
"""Classes of errors of verifiers that say that a service failed. Of a ProviderError the HTTP status says so."""


class TasksetError(Exception):
    """A rollout of verifiers failed. ``kind`` is its class of the error, ``status_code`` that of a call, if any."""

    def __init__(self, kind: str, error: str, status_code: int | None = None) -> None:
        super().__init__(error)
        self.kind, self.status_code = kind, status_code


class TasksetServiceError(TasksetError, ConnectionError):
    """The same, because of a service that may come back."""


def program_command(python: str, *arguments: str) -> list[str]:
    return [python, "-P", str(_PROGRAM), *arguments]


def program_variables(python: str) -> dict[str, str]:
    """Return the program's environment variables: this process's without this Python's, and ``uv`` of its own found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    folder = Path(shutil.which(python) or python).parent.absolute()
    return {**kept, "PATH": os.pathsep.join([str(folder), kept.get("PATH", os.defpath)])}


class Taskset:
    """The agent. ``server`` is the process id of the fork server, the socket to the program, and the program."""

    server: ClassVar[tuple[int, socket.socket, subprocess.Popen[bytes]]]

    @staticmethod
    def prepare(settings: Mapping[str, Any]) -> None:
        """Start the program and wait until it has loaded the taskset.

        Raises:
            ValueError: it can't, or ended.
        """
        ours, theirs = socket.socketpair()
        python = settings["python"]
        with theirs:
            program = subprocess.Popen(
                program_command(python, "serve", str(theirs.fileno()), settings["taskset"]),
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=program_variables(python),
            )  # fmt: skip
        with suppress(ConnectionError):  # that it has ended is found below
            ours.sendall(json.dumps(settings["extra"]).encode() + b"\n")
        with ours.makefile("rb") as file:
            line = file.readline()
        if not line:
            raise ValueError(f"{python} ended with exit status {program.wait()}; see its output above")
        if error := json.loads(line)["error"]:
            raise ValueError(f"verifiers can't load the taskset {settings['taskset']}: {error}")
        Taskset.server = os.getpid(), ours, program

    async def run(self, task: Task) -> dict[str, Any]:
        """Have the program play the row's task. Return its reward and metrics.

        Raises:
            TasksetError: the rollout failed.
            ConnectionError: the program has ended.
        """
        if missing := [name for name in (TASK, DIGEST) if name not in task.extra_info]:
            raise TasksetError("row", f'the row has no {missing[0]}; set data.train = "verifiers:TASKSET"')
        request = {name: task.extra_info[name] for name in (TASK, DIGEST)} | {"base_url": task.base_url}
        line = await self._ask(json.dumps(request).encode() + b"\n")
        if not line:
            self._end_server()
            raise ConnectionError("the process of environment.python has ended; see its output above")
        reply = json.loads(line)
        if "kind" in reply:
            raise (TasksetServiceError if reply["kind"] in _PASSING else TasksetError)(**reply)
        return reply

    async def _ask(self, request: bytes) -> bytes:
        """Return the program's reply to one rollout; empty if the program has ended."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_BYTES)
        try:
            with theirs:
                socket.send_fds(self.server[1], [b"R"], [theirs.fileno()])
            writer.write(request)
            return await reader.readline()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def _end_server(self) -> None:
        """End the fork server, and this process with it. The pool starts another one, which starts the program."""
        if os.getppid() == self.server[0]:
            os.kill(self.server[0], signal.SIGTERM)
