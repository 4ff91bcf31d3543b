"""The types that authors of environments need, and helpers that read tool calls. Standard library only.

An environment is a module, a class or an object with an async ``step`` (and, if it makes its own first state,
``reset``), or with an async ``generate`` that plays a whole rollout by itself. A class is instantiated for every
rollout. docs/environments.md has complete examples; ``child.play`` is the loop that calls them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

Messages = Sequence[Mapping[str, str]]
State = str | Messages
"""The whole text that the model continues; or a conversation, which is rendered with the model's chat template."""


class StepResult(TypedDict, total=False):
    """What ``step`` returns. Only ``next_state`` (unless ``done``) and ``reward`` are needed.

    Keys:
        next_state: as far as it begins with the old state and the action, the model's own tokens are kept and only the
            rest is tokenised; if it does not, a new token sequence of the same rollout begins with it.
        reward: for this action, finite; what is trained on.
        score: for this action, finite, only logged; ``reward`` if absent. A rollout's accuracy is the sum of its
            scores, cut to 0..1, so let them add up to 1 where the task is solved.
        done: whether that was the last action; false if absent.
        extra_info: replaces the old one. If absent, the old one stays, with any changes made to it.
    """

    next_state: State | None
    reward: float
    score: float
    done: bool
    extra_info: dict[str, Any]


class Environment(Protocol):
    """A task of several turns. All methods are async; plain functions are accepted too, and block the process.

    ``reset`` is optional: without it, or when it returns None, the row's own messages are the first state. It may
    return the state alone or ``(state, extra_info)``. ``close()`` (optional) is called at the rollout's end.
    """

    async def reset(self, extra_info: dict[str, Any]) -> State | tuple[State, dict[str, Any]] | None:
        """Return the first state."""
        ...

    async def step(self, state: State, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Apply the model's ``action`` (its text, without special tokens) to ``state``."""
        ...


@dataclass(frozen=True, slots=True)
class Action:
    """One answer of the model.

    ``finish_reason`` is ``length`` if the answer was cut, else ``stop``. A stop string is kept in ``text``.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int


class RolloutOverError(Exception):
    """``environment.max_turns`` or the tokens are used up. It ends the rollout and is no failure: don't catch it."""


class Rollout(Protocol):
    """The argument of ``generate(rollout)``: it samples from the model and records rewards.

    Attributes:
        extra_info: as for ``step``.
        prompt: the row's messages rendered with the chat template; None if the row has none.
    """

    extra_info: dict[str, Any]
    prompt: str | None

    async def sample(self, state: State, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Action:
        """Sample the model's answer to ``state``; ``max_tokens`` and ``stop`` narrow the run's own settings.

        Raises:
            RolloutOverError: the rollout has no further turn.
        """
        ...

    def reward(self, reward: float, score: float | None = None) -> None:
        """Add to the reward of the newest action; ``score`` as in ``StepResult``.

        Raises:
            ValueError: nothing was sampled yet, or a number is not finite.
        """
        ...


_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that the model wrote.

    If ``error`` is not empty, the call is malformed: ``error`` is a message for the model, and the other fields have no
    meaning.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in ``text``, in order, in the form that Qwen's and Hermes's chat templates ask for.

    That is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. ``arguments`` may also be JSON in a text; they
    may be left out. A malformed call is returned with its ``error``, which is meant for the model.
    """
    return [_parse_call(body.strip()) for body in _TOOL_CALL.findall(text)]


def _parse_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"a tool call must be JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return ToolCall("", {}, 'a tool call must look like {"name": "...", "arguments": {...}}')
    return ToolCall(call["name"], arguments)


def last_tag(text: str, tag: str) -> str | None:
    """Return the text inside the last ``<tag>...</tag>``, stripped; None if there is no such tag."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None
