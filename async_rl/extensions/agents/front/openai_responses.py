"""``POST /v1/responses``: OpenAI's Responses, which Codex and OpenAI's agents SDK speak.

Nothing is stored: a request has its whole conversation. Tools that OpenAI's servers run are left out. A custom tool,
whose input is a text, is a function with the parameter ``input``; one of a namespace has its name in front.
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
    read,
    read_all,
    refused,
    server_sent,
    settings_of,
    text_of,
)
from async_rl.extensions.agents.front.requests import Note

_OWN = frozenset({"input", "instructions", "max_output_tokens", "reasoning", "text", "include"})
_LOGPROBS = "message.output_text.logprobs"
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_TEXTS = {
    "message": ("output_text", "text"), "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"), "custom_tool_call": ("custom_tool_call_input", "input"),
}  # fmt: skip
"""By the type of an item: the name of the events in which its text comes, and its field there."""


class _Item(msgspec.Struct):
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | list[Any] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[Any] = ""


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = ""
    parameters: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []


def _chat(asked: Body, note: Note) -> Body:
    told = text_of(asked.get("instructions"), "instructions", note)
    messages: list[Body] = [{"role": "system", "content": told}] if told else []
    given = asked.get("input")
    for item in read_all([{"content": given}] if isinstance(given, str) else given, _Item, "input", note):
        _add(messages, item, note)
    if not given:
        raise refused("input", "a text or items", given)
    tools = [
        function_tool(name, tool.description, _INPUT if tool.type == "custom" else tool.parameters)
        for name, _, tool in _tools(asked, note)
    ]
    settings = settings_of(asked, "reasoning", note, effort="reasoning_effort")
    settings |= settings_of(asked, "text", note, verbosity="verbosity")
    included = read(asked.get("include") or [], list[str], "include")
    for kind in [one for one in included if one != _LOGPROBS]:
        note(f"include: {kind}", kind)
    settings["logprobs"] = _LOGPROBS in included
    return chat_body(asked, _OWN, messages, tools, max_tokens=asked.get("max_output_tokens"), **settings)


def _tools(asked: Body, note: Note) -> Iterator[tuple[str, str, _Tool]]:
    """Yield the tools that the client runs: the name that the model knows, the namespace, and the tool."""
    for outer in read_all(asked.get("tools"), _Tool, "tools", note):
        space = outer.name if outer.type == "namespace" else ""
        if space and outer.description:
            note("tools.description", outer.description)
        for tool in read_all(outer.tools, _Tool, "tools.tools", note) if space else [outer]:
            if tool.type in ("function", "custom"):
                yield _full(space, tool.name), space, tool
            else:
                note(f"tools: {tool.type}", tool.name)


def _full(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _add(messages: list[Body], item: _Item, note: Note) -> None:
    """Add an item to the messages of a chat. The model's items that follow each other are one message."""
    text = text_of(item.output or item.content, "input", note, "input_text", "output_text", "reasoning_text")
    match item.type:
        case "message" if item.role == "assistant":
            _answering(messages, "content", "tool_calls")["content"] = text
        case "message":  # few templates read developers' messages
            messages.append({"role": "system" if item.role == "developer" else item.role, "content": text})
        case "reasoning":
            going_on = _answering(messages, "tool_calls")  # thoughts may stand behind a text
            going_on["reasoning_content"] = going_on.get("reasoning_content", "") + text
        case "function_call" | "custom_tool_call":
            arguments = item.arguments if item.type == "function_call" else json.dumps({"input": item.input})
            calls = _answering(messages).setdefault("tool_calls", [])
            calls.append(called(item.call_id, _full(item.namespace, item.name), arguments))
        case "function_call_output" | "custom_tool_call_output":
            named = {"name": _full(item.namespace, item.name)} if item.name or item.namespace else {}
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text, **named})
        case _:
            raise refused("input", "items of messages, functions, custom tools and reasoning", item.type)


def _answering(messages: list[Body], *ends: str) -> Body:
    """Return the message of the model that goes on: the last one, unless it has one of the fields ``ends``."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in ends):
        messages.append({"role": "assistant"})
    return messages[-1]


def _answer(answer: Body, asked: Body) -> Body:
    (choice,) = answer["choices"]
    number, usage = answer["id"].removeprefix("chatcmpl-"), answer["usage"]
    status = {"length": "incomplete", None: "in_progress"}.get(choice["finish_reason"], "completed")
    return {
        "id": f"resp_{number}", "object": "response", "created_at": 0, "model": answer["model"], "error": None,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": list(_items(choice, number, asked)), "parallel_tool_calls": True,
        "tool_choice": asked.get("tool_choice") or "auto", "tools": asked.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }  # fmt: skip


def _items(choice: Body, number: str, asked: Body) -> Iterator[Body]:
    logprobs = (choice.get("logprobs") or {}).get("content", [])
    known = {name: (space, tool) for name, space, tool in _tools(asked, lambda name, value: None)}
    done, calls, parts = {"status": "completed"}, choice["message"].get("tool_calls", ()), choice["parts"]
    is_silent = not (choice["message"].get("content") or calls or choice["finish_reason"] is None)
    for place, (name, text) in enumerate([*parts, *([("content", "")] if is_silent else [])]):
        if name == "content":
            content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
            yield {"type": "message", "id": f"msg_{number}_{place}", "role": "assistant", "content": content, **done}
        else:
            content = [{"type": "reasoning_text", "text": text}]
            yield {"type": "reasoning", "id": f"rs_{number}_{place}", "summary": [], "content": content, **done}
    for place, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        space, tool = known.get(name, ("", _Tool("function", name)))
        own = {"id": f"fc_{number}_{place}", "call_id": call["id"], "name": tool.name, **done}
        own |= {"namespace": space} if space else {}
        text = json.loads(arguments).get("input")
        if tool.type == "custom" and isinstance(text, str):
            yield {"type": "custom_tool_call", "input": text, **own}
        else:
            yield {"type": "function_call", "arguments": arguments, **own}


def _events(answer: Body, told: Body | None, asked: Body) -> Iterator[Body]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    if told is None:
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
    is_whole = answer["status"] != "in_progress"
    for index, item, had, is_done in growing(answer["output"], told["output"] if told else (), is_whole=is_whole):
        kind, name = _TEXTS[item["type"]]
        where = {"output_index": index, "item_id": item["id"]}
        parts = item.get("content", ())
        where |= {"content_index": 0, "logprobs": []} if parts else {}
        if had is None:
            empty = {**item, "status": "in_progress", **({"content": []} if parts else {name: ""})}
            yield {"type": "response.output_item.added", "output_index": index, "item": empty}
            for part in parts:
                yield {"type": "response.content_part.added", **where, "part": {**part, name: ""}}
        text = (parts[0] if parts else item)[name]
        if (rest := text[len(had["content"][0][name]) if had else 0 :]) or had is None:
            yield {"type": f"response.{kind}.delta", **where, "delta": rest}
        if not is_done:
            continue
        yield {"type": f"response.{kind}.done", **where, name: text}
        for part in parts:
            yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    if is_whole:
        yield {"type": f"response.{answer['status']}", "response": answer}


RESPONSES = Dialect(_chat, _answer, _events, lambda event, number: server_sent({**event, "sequence_number": number}))
