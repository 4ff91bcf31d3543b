"""``POST /v1/messages``: Anthropic's API, which Claude Code and the ``anthropic`` package speak.

Tools that Anthropic's servers run are left out, and those that its models know without a schema. Signatures of thoughts
are empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from async_rl.extensions.agents.front.dialects import (
    Body,
    Dialect,
    called,
    chat_body,
    function_tool,
    growing,
    read_all,
    refused,
    server_sent,
    settings_of,
    text_of,
)
from async_rl.extensions.agents.front.requests import Note

_OWN = frozenset({"system", "tool_choice", "stop_sequences", "thinking", "output_config"})
_BILLING = "x-anthropic-billing-header:"
"""What Claude Code begins a block with that is no part of the prompt."""
_THINKS = {"enabled": True, "disabled": False}
_ONE_CALL = "disable_parallel_tool_use"
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}
_DELTAS = {
    "text": [("text", "text_delta", "text")],
    "thinking": [("thinking", "thinking_delta", "thinking"), ("signature", "signature_delta", "signature")],
    "tool_use": [("input", "input_json_delta", "partial_json")],
}
"""By the type of a block: its fields that come in events, each with its event's type and its name there."""


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | None = None


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] = {}


def _chat(asked: Body, note: Note) -> Body:
    told = read_all([{"role": "system", "content": asked.get("system") or ""}], _Message, "system", note)
    given = read_all(asked.get("messages"), _Message, "messages", note)
    messages = [one for message in told for one in _messages(message, "system", note)]
    messages += [one for message in given for one in _messages(message, "messages.content", note)]
    last = messages[-1]["role"] if given and messages else None
    if last in ("assistant", None):  # the API would go on with the text of the model's
        raise refused("messages", "a user's message or a tool's result at the end", last)
    tools: list[Body] = []
    for tool in read_all(asked.get("tools"), _Tool, "tools", note):
        if tool.type in (None, "custom"):
            tools.append(function_tool(tool.name, tool.description, tool.input_schema))
        else:
            note(f"tools: {tool.type}", tool.name)
    settings = settings_of(asked, "output_config", note, effort="reasoning_effort")
    choice = settings_of(asked, "tool_choice", note, type="type", name="name", **{_ONE_CALL: _ONE_CALL})
    kind = {"any": "required", "tool": {"type": "function", "name": choice.get("name")}}.get(str(choice.get("type")))
    settings |= {"tool_choice": kind or choice.get("type"), f"tool_choice.{_ONE_CALL}": choice.get(_ONE_CALL)}
    thinks = settings_of(asked, "thinking", note, type="type").get("type")
    if thinks not in (None, *_THINKS):
        note("thinking.type", thinks)  # the model decides, as it does without the field
    settings["enable_thinking"] = _THINKS.get(str(thinks))
    return chat_body(asked, _OWN, messages, tools, stop=asked.get("stop_sequences"), **settings)


def _messages(message: _Message, where: str, note: Note) -> Iterator[Body]:
    """Yield a message as those of a chat. Tools' results and parts of the system's are messages of their own there."""
    raw = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    found: Body = {"role": message.role, "content": ""}
    for block in read_all(raw, _Block, where, note):
        match message.role, block.type:
            case "system", "text" if block.text.startswith(_BILLING):
                note(f"system: {_BILLING}", block.text)
            case "system", "text" if block.text:
                yield {"role": "system", "content": block.text}
            case _, "text":
                found["content"] += block.text
            case "user", "tool_result":
                if found["content"]:
                    yield found
                result = text_of(block.content, where, note, "text")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
                found = {"role": "user", "content": ""}
            case "assistant", "tool_use":
                call = called(block.id, block.name, json.dumps(block.input))
                found["tool_calls"] = [*found.get("tool_calls", []), call]
            case "assistant", "thinking" | "redacted_thinking":
                found["reasoning_content"] = found.get("reasoning_content", "") + block.thinking
            case role, kind:
                raise refused(where, f"blocks that a message of the role {role} may have here", kind)
    if found["content"] or message.role == "assistant":
        yield found


def _answer(answer: Body, asked: Body) -> Body:
    (choice,) = answer["choices"]
    message, stop = choice["message"], choice["stop_reason"]
    content: list[Body] = [
        {"type": "text", "text": text} if name == "content" else {"type": "thinking", "thinking": text, "signature": ""}
        for name, text in choice["parts"]
    ]
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    ended = None if choice["finish_reason"] is None else "end_turn" if stop is None else "stop_sequence"
    return {
        "id": answer["id"].replace("chatcmpl-", "msg_"), "type": "message", "role": "assistant",
        "model": answer["model"], "content": content,
        "stop_reason": _STOP_REASONS.get(choice["finish_reason"], ended), "stop_sequence": stop,
        "usage": {
            "input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": answer["usage"]["completion_tokens"],
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip


def _events(answer: Body, told: Body | None, asked: Body) -> Iterator[Body]:
    ends = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    is_whole = ends["stop_reason"] is not None
    if told is None:
        yield {"type": "message_start", "message": {**answer, "content": [], **dict.fromkeys(ends)}}
    blocks = growing(answer["content"], told["content"] if told else (), is_whole=is_whole)
    for index, block, had, is_done in blocks:
        deltas = _DELTAS[block["type"]]
        if had is None:
            empty = {field: type(block[field])() for field, _, _ in deltas}
            yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        for field, kind, name in deltas:
            text = block[field] if isinstance(block[field], str) else json.dumps(block[field])
            if (rest := text[len(had[field]) if had else 0 :]) or (is_done and not text):
                yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: rest}}
        if is_done:
            yield {"type": "content_block_stop", "index": index}
    if is_whole:
        yield {"type": "message_delta", "delta": ends, "usage": answer["usage"]}
        yield {"type": "message_stop"}


MESSAGES = Dialect(_chat, _answer, _events, lambda event, _: server_sent(event), server_sent({"type": "ping"}))
