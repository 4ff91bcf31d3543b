"""An agent's conversation, as ``RewardInput.transcript`` has it, for rewards that read text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.rewards.records import RewardInput


def conversation_of(item: RewardInput) -> list[dict[str, str]]:
    """Return the whole conversation that ends with the rollout's answer, as messages of a role and a text.

    A tool call is written into the text, as ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, and a part that
    is no text as JSON. Without an agent the conversation is the prompt and the answer.
    """
    if not item.transcript:
        return [*(dict(message) for message in item.messages), {"role": "assistant", "content": item.text}]
    return [{"role": str(message["role"]), "content": _text(message)} for message in item.transcript]


def after_prompt(transcript: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages from the model's first answer on."""
    roles = [message["role"] for message in transcript]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return [dict(message) for message in transcript[first:]]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    texts = [one.get("text", one) if isinstance(one, Mapping) else one for one in parts]
    said = "".join(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in texts)
    calls = [_call(call.get("function") or {}) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (said, *calls) if part)


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # an agent's own form stays as it is
            arguments = json.loads(arguments)
    said = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{said}</tool_call>"
