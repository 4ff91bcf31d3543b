"""The types that authors of environments need, and helpers that read tool calls. It imports only the standard library.

An environment is a module, a class or an object. It has an async function ``step``, and also ``reset`` if it makes the
first state. Instead, it may have an async function ``generate`` that plays a whole rollout. A class is instantiated
for every rollout. docs/environments.md has complete examples. ``child.play`` is the loop that calls an environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

Messages = Sequence[Mapping[str, str]]
State = str | Messages
"""What the model answers: a text that it continues, or a conversation, which the model's chat template renders."""


class StepResult(TypedDict, total=False):
    """The dict that an environment's ``step`` returns. ``reward`` is always needed, ``next_state`` unless ``done``.

    Keys:
        next_state: the state that the model answers next. If it begins with the old state and the action, the tokens
            that the model sampled are kept, and only the rest is tokenized. Otherwise a new token sequence of the same
            rollout begins.
        reward: the reward of this action, which the model is trained on. It must be finite.
        score: the score of this action, which is only logged. It must be finite. If absent, it is ``reward``. A
            rollout's accuracy is the sum of its scores, cut to 0..1, so the scores of a solved task should sum to 1.
        done: whether this action was the last one of the rollout. If absent, it is False.
        extra_info: the dict that later steps get. If absent, they get the same dict again, with changes made to it.
    """

    next_state: State | None
    reward: float
    score: float
    done: bool
    extra_info: dict[str, Any]


class Environment(Protocol):
    """The methods of an environment that plays turn by turn. They may be async or plain functions.

    ``reset`` is optional. Without ``reset``, or if it returns None, the row's messages are the first state, or its text
    with ``data.prompt_format = "text"``. An optional method ``close()`` is called at the end of the rollout.

    An optional function ``prepare(extra)`` is called once, before the processes of rollouts are forked, with
    ``environment.extra``: the place for imports that depend on it. A class has it as a static method.
    """

    async def reset(self, extra_info: dict[str, Any]) -> State | tuple[State, dict[str, Any]] | None:
        """Return the first state, or a pair of the first state and the ``extra_info`` for the first step."""
        ...

    async def step(self, state: State, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Apply the model's ``action`` to ``state`` and return the result.

        ``action`` is the text that the model sampled, without special tokens that end a turn or pad.
        """
        ...


@dataclass(frozen=True, slots=True)
class Action:
    """One answer of the model: its text and its number of tokens.

    ``finish_reason`` is ``length`` if the answer was cut at a token limit, else ``stop``. If a stop string ended the
    answer, the stop string is part of ``text``.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int


class RolloutOverError(Exception):
    """The rollout gets no further turn, because ``environment.max_turns`` or its tokens are used up.

    The error ends the rollout and does not count as a failure, so ``generate`` should not catch it.
    """


class Rollout(Protocol):
    """The argument of ``generate(rollout)``. It samples from the model and records rewards.

    Attributes:
        extra_info: the row's ``extra_info``, ``environment.extra``, and what identifies the rollout.
        prompt: the row's messages, rendered with the chat template. None if the row has no messages.
        first_state: the row's messages, or its text with ``data.prompt_format = "text"``. None if it has neither.
    """

    extra_info: dict[str, Any]
    prompt: str | None
    first_state: State | None

    async def sample(self, state: State, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Action:
        """Sample and return the model's answer to ``state``.

        The answer ends after ``max_tokens`` tokens, if given, or at one of the texts in ``stop``. The limits of the run
        hold too.

        Raises:
            RolloutOverError: the rollout gets no further turn.
        """
        ...

    def reward(self, reward: float, score: float | None = None) -> None:
        """Add ``reward`` and ``score`` to those of the newest action. If None, ``score`` is ``reward``.

        Raises:
            ValueError: no action was sampled yet, or a number is not finite.
        """
        ...


class Task(Protocol):
    """The argument of an agent, an async function ``run(task)``. The agent asks the endpoint for the model's answers.

    It returns its reward, a dict with ``reward`` and ``score``, or None: then the run's reward functions judge its last
    answer.

    Attributes:
        base_url: the endpoint, for this rollout alone: what OpenAI's clients call ``base_url``.
        api_key: the rollout's key. It is in ``base_url``, too, so any other key does with it.
        messages: the row's messages; empty if it has none.
        prompt: the same, rendered with the chat template, or the row's text; None if it has neither.
        extra_info: the row's other fields, ``environment.extra``, and what identifies the rollout.
    """

    base_url: str
    api_key: str
    messages: list[dict[str, str]]
    prompt: str | None
    extra_info: dict[str, Any]


_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that the model wrote: the tool's name and its arguments.

    If ``error`` is not empty, the call is malformed. ``error`` is then a message for the model, and the other fields
    have no meaning.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the tool calls in ``text``, in order.

    A call has the form ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, which the chat templates of Qwen
    and Hermes ask for. ``arguments`` may be an object, JSON text of an object, or absent. A malformed call is returned
    with an ``error``.
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
    """Return the stripped text inside the last ``<tag>...</tag>`` of ``text``. None if ``text`` has no such tags."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None
