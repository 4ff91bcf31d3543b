"""The process in which an environment plays rollouts, one at a time. A socket connects it to the generator.

``fork_server`` imports the environment's code and forks this process. ``play`` is the loop over turns: reset, then
sample and step until done. It checks everything that an environment returns, so that an error names the environment's
mistake.

Messages are JSON objects in frames of ``net.streams``, so that a malformed message of an environment can do no harm.
The fork server gets ``prepare`` (allowed, digest, extra). The generator sends ``start`` (prompt, state, extra_info,
seed, max_turns; for an agent also endpoint: base_url, api_key, command, sandbox, finish_key), ``sampled`` (text,
finish_reason, num_tokens), ``over`` (the rollout gets no further turn) and ``cancel``. This process sends ``sample``
(state, max_tokens, stop), ``ended`` (turns: the reward and score of every action; for an agent reward and score, or
None, and metrics), ``failed`` (error; for an exception also what ``describe_error`` returns, as detail and place, its
class as kind, and ``is_transient``) and ``cancelled``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import random
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from async_rl.environments.protocol import Action, Rollout, RolloutOverError, State
from async_rl.errors import WireError
from async_rl.net.streams import pack_frame, take_frame
from async_rl.process.transient import is_transient
from async_rl.process.user_code import describe_error
from async_rl.records import row_fields

MAX_BYTES = 64 << 20


class FrameError(Exception):
    """A message between generator and environment can't be packed or unpacked: it is too long or no JSON object."""


def pack(message: dict[str, Any]) -> bytes:
    """Return ``message`` as the bytes of one frame: its JSON text, preceded by the length of the text.

    Raises:
        FrameError: the message can't be written as JSON, or is too long.
    """
    try:
        body = json.dumps(message).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(
            f"can't send the environment's message {message.get('type')!r} as JSON: {error}; use only text, numbers, "
            f"lists and dicts in states and extra_info"
        ) from error
    if len(body) > MAX_BYTES:
        raise FrameError(
            f"expected the environment's message {message.get('type')!r} to have at most {MAX_BYTES} bytes, got "
            f"{len(body)}; shorten the texts of states or extra_info"
        )
    return pack_frame(body)


def unpack(buffer: bytearray) -> dict[str, Any] | None:
    """Remove the first message from ``buffer``, the bytes received so far, and return it. None if it is incomplete.

    Raises:
        FrameError: the message is too long, or is not a JSON object.
    """
    try:
        body = take_frame(buffer, max_bytes=MAX_BYTES)
    except WireError as error:
        raise FrameError(str(error)) from error
    if body is None:
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"expected a message in JSON, got other bytes: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"expected a message that is a JSON object, got {type(message).__name__}")
    return message


_ERROR_CHARACTERS = 4000
_CHUNK = 1 << 16
_STEP_KEYS = {"next_state", "reward", "score", "done", "extra_info"}


class RemoteRollout:
    """The ``protocol.Rollout`` of an environment's process: it asks the generator for samples over the socket.

    ``turns`` holds a list [reward, score] for every action so far. ``endpoint`` is where an agent calls; None for an
    environment, whose samples come over the socket.
    """

    def __init__(self, channel: _Channel, start: dict[str, Any]) -> None:
        self.extra_info: dict[str, Any] = row_fields(start["extra_info"])
        self.prompt: str | None = start["prompt"]
        self.first_state: State | None = start["state"]
        self.endpoint: Mapping[str, Any] | None = start.get("endpoint")
        self.turns: list[list[float]] = []
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._channel = channel
        self._max_turns: int = start["max_turns"]

    async def sample(self, state: State, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Action:
        if len(self.turns) >= self._max_turns:
            raise RolloutOverError(
                f"all {self._max_turns} turns of the rollout (environment.max_turns) have been played; let this error "
                f"end the rollout, or raise the key"
            )
        if isinstance(stop, str):
            raise EnvironmentFault(
                f"the environment's call of sample: stop: expected a list of texts, got the text {stop!r}; put it in a "
                f"list"
            )
        if "" in stop:
            raise EnvironmentFault(
                f"the environment's call of sample: stop: expected texts that are not empty, got {list(stop)!r}; leave "
                f"the empty one out"
            )
        conversation = state if isinstance(state, str) else [dict(message) for message in state]
        await self._channel.send(
            {"type": "sample", "state": conversation, "max_tokens": max_tokens, "stop": list(stop)}
        )
        answer = await self.answers.get()
        if answer["type"] == "over":
            raise RolloutOverError(
                "the rollout has used all its tokens (sampling.max_new_tokens); let this error end the rollout, or "
                "raise the key"
            )
        self.turns.append([0.0, 0.0])
        return Action(answer["text"], answer["finish_reason"], answer["num_tokens"])

    def reward(self, reward: float, score: float | None = None) -> None:
        score = reward if score is None else score
        if not self.turns:
            raise ValueError("rollout.reward: expected an action to reward, got none; call rollout.sample first")
        if not is_finite(reward) or not is_finite(score):
            raise ValueError(
                f"rollout.reward: expected finite numbers as reward and score, got {reward!r} and {score!r}; correct "
                f"the environment"
            )
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
        """Wait for the generator's next message and return it. None if the generator closed the socket."""
        while (message := unpack(self._buffer)) is None:
            chunk = await asyncio.get_running_loop().sock_recv(self._sock, _CHUNK)
            if not chunk:
                return None
            self._buffer += chunk
        return message


def prepare(code: Any, extra: dict[str, Any]) -> str:
    """Call the environment's function ``prepare``, if it has one, with ``environment.extra``.

    Return the error, for the user, or an empty text.
    """
    if not hasattr(code, "prepare"):
        return ""
    try:
        inspect.signature(code.prepare).bind(extra)
    except (TypeError, ValueError):
        return (
            "expected its function prepare to take one argument, environment.extra, got another one; "
            "write prepare(extra), in a class as a static method, or give it another name"
        )
    try:
        asyncio.run(_prepared(code.prepare(extra)))
    except Exception as error:  # an error in the environment's code, which the user gets in words
        detail, _ = describe_error(error)
        return f"its function prepare failed: {detail}; correct it, or what it reads of extra"
    return ""


async def _prepared(result: Any) -> None:
    await awaited(result)


Player = Callable[[Any, RemoteRollout], Awaitable[dict[str, Any]]]
"""Plays a rollout with the user's code, as ``play`` does, and returns the fields of ``ended``."""
AtEnd = Callable[[], dict[str, Any]]
"""Returns further fields of the last message of a rollout."""


def serve(sock: socket.socket, code: Any, player: Player | None = None, at_end: AtEnd = dict) -> None:
    """Play rollouts with ``code``, the user's environment, until the generator closes the socket."""
    with contextlib.suppress(ConnectionError):
        asyncio.run(_serve(_Channel(sock), code, player or play, at_end))


async def _serve(channel: _Channel, code: Any, player: Player, at_end: AtEnd) -> None:
    rollout: RemoteRollout | None = None
    task: asyncio.Task[None] | None = None
    while (message := await channel.receive()) is not None:
        if message["type"] == "start":
            rollout = RemoteRollout(channel, message)
            _seed(message["seed"])
            task = asyncio.create_task(_play(channel, code, rollout, player, at_end))
        elif message["type"] == "cancel":
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            await channel.send({"type": "cancelled", **at_end()})
        elif rollout is not None:
            rollout.answers.put_nowait(message)


def _seed(seed: int) -> None:
    """Seed the random numbers of Python and numpy. All rollouts of a group get the same seed.

    An environment that needs other random numbers in every rollout can use ``extra_info["index"]``.
    """
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


async def _play(channel: _Channel, code: Any, rollout: RemoteRollout, player: Player, at_end: AtEnd) -> None:
    before = asyncio.all_tasks()
    last: dict[str, Any]
    try:
        try:
            last = {"type": "ended", **await player(code, rollout)}
        finally:
            await _end_tasks(asyncio.all_tasks() - before)
    except (EnvironmentFault, FrameError) as error:
        last = {"type": "failed", "error": str(error)}
    except Exception as error:  # an error in the environment's code fails its rollout; the traceback is logged
        detail, place = describe_error(error)
        trace = traceback.format_exc()[-_ERROR_CHARACTERS:]
        kind = getattr(error, "kind", None) or type(error).__name__
        last = {"type": "failed", "error": trace, "detail": detail, "place": place, "kind": str(kind)}
        last["is_transient"] = is_transient(error)
    await channel.send({**last, **at_end()})


async def _end_tasks(left: set[asyncio.Task[Any]]) -> None:
    """Cancel the background tasks that a rollout left, so that they can't send messages during the next rollout."""
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class EnvironmentFault(Exception):  # noqa: N818  (the author's mistake; not one of the run's errors)
    """The environment returned a malformed value, or called ``sample`` with one."""


async def play(code: Any, rollout: RemoteRollout) -> dict[str, Any]:
    """Play one rollout with the environment ``code``, which is a module, an object or a class. Return its turns.

    A class is instantiated first. Exceptions that the environment raises are passed on.

    Raises:
        EnvironmentFault: the environment returned a malformed value, or called ``sample`` with one.
    """
    environment: Any = code() if inspect.isclass(code) else code
    try:
        if not hasattr(environment, "step") and not hasattr(environment, "generate"):
            raise EnvironmentFault(
                "environment.name: expected a function step or generate, got neither; write one, or set "
                "generator.serve = true if it is an agent"
            )
        if hasattr(environment, "generate"):
            await awaited(environment.generate(rollout))
        else:
            await _turns(environment, rollout)
    except RolloutOverError:
        pass
    finally:
        if hasattr(environment, "close"):
            await awaited(environment.close())
    return {"turns": rollout.turns}


async def _turns(environment: Any, rollout: Rollout) -> None:
    state = await _first_state(environment, rollout)
    while True:
        action = await rollout.sample(state)
        result = await awaited(environment.step(state, action.text, rollout.extra_info))
        _check_step(result)
        rollout.extra_info = result.get("extra_info", rollout.extra_info)
        rollout.reward(result["reward"], result.get("score"))
        if result.get("done", False):
            return
        _check_continued(state, result["next_state"])
        state = result["next_state"]


async def _first_state(environment: Any, rollout: Rollout) -> State:
    made = await awaited(environment.reset(rollout.extra_info)) if hasattr(environment, "reset") else None
    if isinstance(made, tuple):
        if len(made) != 2 or not isinstance(made[1], dict):
            types = ", ".join(type(part).__name__ for part in made)
            raise EnvironmentFault(
                f"the environment's reset: expected a state, or a pair (state, extra_info) with a dict, got a tuple "
                f"({types}); correct what reset returns"
            )
        made, rollout.extra_info = made
    if made is None:
        if rollout.first_state is None:
            raise EnvironmentFault(
                "the environment's reset: expected a first state, because the row has no messages, got None; return a "
                "state from reset"
            )
        return rollout.first_state
    _check_state(made, "the environment's reset")
    return made


def _check_step(result: Any) -> None:
    if not isinstance(result, dict):
        raise EnvironmentFault(
            f"the environment's step: expected a dict, got {type(result).__name__}; correct what step returns"
        )
    if unknown := sorted(map(str, set(result) - _STEP_KEYS)):
        raise EnvironmentFault(
            f"the environment's step: expected only the keys {sorted(_STEP_KEYS)}, got also {unknown}; correct what "
            f"step returns"
        )
    if not is_finite(result.get("reward")):
        raise EnvironmentFault(
            f"the environment's step: reward: expected a finite number, got {result.get('reward')!r}; correct what "
            f"step returns"
        )
    if result.get("score") is not None and not is_finite(result["score"]):
        raise EnvironmentFault(
            f"the environment's step: score: expected a finite number, got {result['score']!r}; correct what step "
            f"returns"
        )
    if not isinstance(result.get("done", False), bool):
        raise EnvironmentFault(
            f"the environment's step: done: expected True or False, got {result['done']!r}; correct what step returns"
        )
    if not isinstance(result.get("extra_info", {}), dict):
        raise EnvironmentFault(
            f"the environment's step: extra_info: expected a dict, got {type(result['extra_info']).__name__}; correct "
            f"what step returns"
        )
    if not result.get("done", False):
        _check_state(result.get("next_state"), "the environment's step: next_state")


def _check_continued(state: State, next_state: State) -> None:
    """Check that ``next_state`` is not a text that begins with messages as Python prints them, as f"{state}" does."""
    if not isinstance(state, str) and isinstance(next_state, str) and next_state.startswith(str(state)):
        raise EnvironmentFault(
            "the environment's step: next_state: expected messages, as the state was, got text that begins with "
            'Python\'s print of them; return [*state, {"role": ..., "content": ...}], or let reset return '
            'extra_info["prompt_text"], so that states are text'
        )


def _check_state(state: Any, where: str) -> None:
    if isinstance(state, str):
        if not state:
            raise EnvironmentFault(
                f"{where}: expected text that is not empty, or a list of messages, got empty text; return a state that "
                f"the model can continue"
            )
        return
    if not isinstance(state, list | tuple) or not state:
        got = type(state).__name__ if state or not isinstance(state, list | tuple) else "an empty list"
        raise EnvironmentFault(
            f"{where}: expected text or a list of messages, got {got}; return text, or messages whose values are text"
        )
    for number, message in enumerate(state):
        if (wrong := _wrong_message(message)) is not None:
            raise EnvironmentFault(
                f"{where}: expected text or a list of messages, got a list whose item {number} {wrong}; a message is a "
                f'dict such as {{"role": "user", "content": "..."}}, and its values are text'
            )


def _wrong_message(message: Any) -> str | None:
    """Return what is wrong with an item of a conversation, or None if it is a message."""
    if not isinstance(message, Mapping):
        return f"is {message!r:.40} ({type(message).__name__})"
    wrong = next((key for key, value in message.items() if not isinstance(value, str)), None)
    return None if wrong is None else f"has {message[wrong]!r:.40} ({type(message[wrong]).__name__}) as its {wrong}"


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


async def awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
