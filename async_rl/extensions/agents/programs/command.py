"""The agent of ``environment.command``: a program that gets its rollout in environment variables and a file.

``fork_server.play_agent`` runs it like any other agent, in a process of the environment's pool. The program has a
session of its own, so that all that it starts ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from async_rl.extensions.agents.programs.isolation import Level, forward, isolate, session_folder

if TYPE_CHECKING:
    from async_rl.extensions.agents.programs.fork_server import AgentTask

_TAIL_BYTES = 2000


class Command:
    """The agent. ``level`` says how far this machine can isolate programs."""

    level: ClassVar[Level] = "none"

    @staticmethod
    def prepare(settings: Mapping[str, Any]) -> None:
        """Take the pool's settings."""
        Command.level = settings["level"]

    async def run(self, task: AgentTask) -> None:
        """Run the command once. Its reward is what it reports; otherwise the run's functions judge its last answer.

        The program finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, for Anthropic's clients in
        ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, and in ``ASYNC_RL_TASK`` the path of a JSON file with
        ``messages``, ``prompt`` and ``extra_info``, in a folder that is also its ``TMPDIR``. Its standard input is one
        line of JSON with ``finish_url`` and ``finish_key``. The key is there, and neither in the environment nor in a
        file, so that what the program starts does not inherit it.

        Raises:
            RuntimeError: it ended with another exit status than 0. The message has the end of its output.
        """
        level = "none" if task.sandbox == "off" else self.level
        with session_folder() as folder, tempfile.TemporaryFile() as output:  # in the folder it could be replaced
            own = folder.parent if level == "all" else folder  # where the program finds the folder
            content: dict[str, Any] = {
                "messages": task.messages, "prompt": task.prompt, "extra_info": dict(task.extra_info),
            }  # fmt: skip
            (folder / "task.json").write_text(json.dumps(content), encoding="utf-8")
            base = task.base_url.removesuffix("/v1")
            variables = {
                "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "TMPDIR": str(own),
                "ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": task.api_key, "ASYNC_RL_TASK": str(own / "task.json"),
            }  # fmt: skip
            finish = {"finish_url": f"{base}/finish", "finish_key": task.finish_key}
            process = await _started(task, folder, level, {**os.environ, **variables}, output)
            try:
                await process.communicate(json.dumps(finish).encode() + b"\n")
                status = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if status:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = output.read().decode(errors="replace").strip()
                raise RuntimeError(f"the command ended with exit status {status}; the end of its output: {text}")


async def _started(
    task: AgentTask, folder: Path, level: Level, variables: Mapping[str, str], output: IO[bytes]
) -> asyncio.subprocess.Process:
    """Start the command, isolated up to ``level``."""
    ours, theirs = socket.socketpair()
    port = urlsplit(task.base_url).port if task.sandbox == "loopback" and level != "none" else None
    with ours:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *task.command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, env=variables,
                start_new_session=True,
                preexec_fn=None if level == "none" else partial(isolate, level, folder, port, theirs),
            )  # fmt: skip
        if port is not None and (listeners := socket.recv_fds(ours, 1, 1)[1]):
            await forward(socket.socket(fileno=listeners[0]), port)
    return process
