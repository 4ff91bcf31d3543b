"""What a chat's answer says: thoughts, text and tool calls, read from the text that was sampled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from async_rl.environments.protocol import parse_tool_calls

_CALL, _THOUGHTS_END = "<tool_call>", "</think>"


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer in parts. ``calls`` are pairs of a tool's name and its arguments as JSON text."""

    content: str
    thoughts: str | None
    calls: tuple[tuple[str, str], ...]


def parse_answer(text: str, *, has_tools: bool) -> Parsed:
    """Split an answer into thoughts, text and tool calls.

    Thoughts are what stands before ``</think>``. Tool calls have the form ``<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`` of Qwen and Hermes, and are read only if the request names tools. An answer with a malformed
    call stays text, so that the agent sees what the model wrote.
    """
    thoughts, found, rest = text.partition(_THOUGHTS_END)
    content = rest if found else text
    calls = parse_tool_calls(content) if has_tools and _CALL in content else []
    if any(call.error for call in calls):
        calls = []
    if calls:
        content = content.partition(_CALL)[0]
    return Parsed(
        content=content.strip("\n") if found or calls else content,
        thoughts=thoughts.removeprefix("<think>").strip("\n") if found else None,
        calls=tuple((call.name, json.dumps(call.arguments)) for call in calls),
    )


def message_of(parsed: Parsed, call_ids: str) -> dict[str, Any]:
    """Return the answer as a message of OpenAI's API. ``call_ids`` is the beginning of the ids of its tool calls."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
    if parsed.thoughts is not None:
        message["reasoning_content"] = parsed.thoughts
    if parsed.calls:
        message["tool_calls"] = [
            {"id": f"{call_ids}-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(parsed.calls)
        ]
    return message
