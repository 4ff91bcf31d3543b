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
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.extensions.agents.programs.fork_server import AgentTask

_TAIL_CHARACTERS = 2000


async def run(task: AgentTask) -> None:
    """Run the command once. Its reward is what it reports; otherwise the run's reward functions judge its last answer.

    The program finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, for Anthropic's clients in
    ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, and in ``ASYNC_RL_TASK`` the path of a JSON file with
    ``messages``, ``prompt`` and ``extra_info``. Its standard input is one line of JSON with
    ``finish_url`` and ``finish_key``. The key is there, and neither in the environment nor in a file, so that what the
    program starts does not inherit it.

    Raises:
        RuntimeError: it ended with another exit status than 0. The message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="async-rl-agent-") as folder:
        path, output = Path(folder) / "task.json", Path(folder) / "output"
        content: dict[str, Any] = {
            "messages": task.messages, "prompt": task.prompt, "extra_info": dict(task.extra_info),
        }  # fmt: skip
        path.write_text(json.dumps(content), encoding="utf-8")
        base = task.base_url.removesuffix("/v1")
        variables = {
            "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "ASYNC_RL_TASK": str(path),
            "ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": task.api_key,
        }  # fmt: skip
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *task.command, stdin=asyncio.subprocess.PIPE, stdout=file, stderr=file,
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
        finish = {"finish_url": f"{base}/finish", "finish_key": task.finish_key}
        try:
            await process.communicate(json.dumps(finish).encode() + b"\n")
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if status:
            text = output.read_text(encoding="utf-8", errors="replace").strip()
            raise RuntimeError(
                f"the command ended with exit status {status}; the end of its output: {text[-_TAIL_CHARACTERS:]}"
            )
