"""Helpers for environments whose model calls tools: what it asked for, read from its text. Standard library only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

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
    """The calls in ``text``, in order, in the form that Qwen's and Hermes's chat templates ask for.

    That is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. ``arguments`` may also be JSON in a text; they
    may be left out. A malformed call is returned with its ``error``, so that the model can be told.
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
    """What is inside the last ``<tag>...</tag>``, without spaces around it; None if there is none."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None
