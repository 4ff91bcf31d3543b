"""One environment's process: plays rollouts, one at a time, over a socket to the generator.

Forked by ``fork_server``, which imported the environment's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from async_rl.environments.frames import FrameError, pack, unpack
from async_rl.environments.play import EnvironmentFault, is_finite, play
from async_rl.environments.protocol import Action, RolloutOverError, State

_ERROR_CHARACTERS = 4000
_CHUNK = 1 << 16


class RemoteRollout:
    """``protocol.Rollout`` over the socket. ``turns`` has [reward, score] of every action so far."""

    def __init__(self, channel: _Channel, start: dict[str, Any]) -> None:
        self.extra_info: dict[str, Any] = start["extra_info"]
        self.prompt: str | None = start["prompt"]
        self.turns: list[list[float]] = []
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._channel = channel
        self._max_turns: int = start["max_turns"]

    async def sample(self, state: State, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Action:
        if len(self.turns) >= self._max_turns:
            raise RolloutOverError(f"{self._max_turns} turns (environment.max_turns) are played")
        if isinstance(stop, str):
            raise EnvironmentFault(f"sample: stop: expected a list of texts, got the text {stop!r}")
        conversation = state if isinstance(state, str) else [dict(message) for message in state]
        await self._channel.send(
            {"type": "sample", "state": conversation, "max_tokens": max_tokens, "stop": list(stop)}
        )
        answer = await self.answers.get()
        if answer["type"] == "over":
            raise RolloutOverError("sampling.max_new_tokens are used up")
        self.turns.append([0.0, 0.0])
        return Action(answer["text"], answer["finish_reason"], answer["num_tokens"])

    def reward(self, reward: float, score: float | None = None) -> None:
        score = reward if score is None else score
        if not self.turns:
            raise ValueError("a reward is for an action, and nothing was sampled yet")
        if not is_finite(reward) or not is_finite(score):
            raise ValueError(f"expected a finite reward and score, got {reward!r} and {score!r}")
        self.turns[-1][0] += float(reward)
        self.turns[-1][1] += float(score)


class _Channel:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()

    async def send(self, message: dict[str, Any]) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, pack(message))

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None once the generator is gone."""
        while (message := unpack(self._buffer)) is None:
            chunk = await asyncio.get_running_loop().sock_recv(self._sock, _CHUNK)
            if not chunk:
                return None
            self._buffer += chunk
        return message


def serve(sock: socket.socket, code: Any) -> None:
    """Play rollouts with ``code`` until the generator closes its end."""
    with contextlib.suppress(ConnectionError):
        asyncio.run(_serve(_Channel(sock), code))


async def _serve(channel: _Channel, code: Any) -> None:
    rollout: RemoteRollout | None = None
    task: asyncio.Task[None] | None = None
    while (message := await channel.receive()) is not None:
        if message["type"] == "start":
            rollout = RemoteRollout(channel, message)
            _seed(message["seed"])
            task = asyncio.create_task(_play(channel, code, rollout))
        elif message["type"] == "cancel":
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            await channel.send({"type": "cancelled"})
        elif rollout is not None:
            rollout.answers.put_nowait(message)


def _seed(seed: int) -> None:
    """The same random numbers for every rollout of a group; those who want others have ``extra_info["index"]``."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


async def _play(channel: _Channel, code: Any, rollout: RemoteRollout) -> None:
    before = asyncio.all_tasks()
    try:
        try:
            await play(code, rollout)
        finally:
            await _end_tasks(asyncio.all_tasks() - before)
    except (EnvironmentFault, FrameError) as error:
        await channel.send({"type": "failed", "error": str(error)})
    except Exception:  # the boundary to the environment's code: its rollout fails, with its traceback in the log
        await channel.send({"type": "failed", "error": traceback.format_exc()[-_ERROR_CHARACTERS:]})
    else:
        await channel.send({"type": "ended", "turns": rollout.turns})


async def _end_tasks(left: set[asyncio.Task[Any]]) -> None:
    """Cancel the background tasks of a rollout, so that they can't send messages during the next one."""
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
