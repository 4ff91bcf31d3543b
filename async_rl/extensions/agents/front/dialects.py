"""The APIs in which agents ask for chats: what each translates, and what their translations share.

A dialect turns a request into the body of a chat, and the chat's answer into its own body and events. Sampling, limits
and the recognition of conversations are those of chats. So the message that a client sends back must give the chat's
own message again, thoughts aside. A field that a dialect does not read is the chat's, which refuses or names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from async_rl.extensions.agents.front.requests import Note, RefusedError

Body = dict[str, Any]
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The functions of one API.

    Attributes:
        chat: returns a request as the body of a chat. Raises ``RefusedError``.
        answer: returns a chat's answer, the first argument, as that to the request, the second.
        events: yields the events that bring a client to what ``answer`` returned, the first argument, from what it had
            returned when less was sampled, the second; None if the client has nothing. The third is the request.
        write: returns an event, whose number is the second argument, as bytes.
        ping: an event that says nothing.
    """

    chat: Callable[[Body, Note], Body]
    answer: Callable[[Body, Body], Body]
    events: Callable[[Body, Body | None, Body], Iterable[Any]]
    write: Callable[[Any, int], bytes]
    ping: bytes = b": ping\n\n"


class _Part(msgspec.Struct):
    type: str
    text: str = ""


def read(value: Any, kind: type[_Kind], where: str) -> _Kind:
    """Return ``value``, which the request has at ``where``, as a ``kind``.

    Raises:
        RefusedError: it is malformed.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RefusedError(400, f"{where}: {error}", "invalid_request", where.partition(".")[0]) from None


def read_all(values: Any, kind: type[_Kind], where: str, note: Note) -> list[_Kind]:
    """The same for a list of structs; None is an empty one. ``note`` gets the fields that ``kind`` has not."""
    found = read(values or [], list[kind], where)
    for value in values or ():
        for name in value.keys() - set(kind.__struct_fields__):  # type: ignore[attr-defined]
            if value[name] not in (None, False, "", [], {}):
                note(f"{where}.{name}", value[name])
    return found


def refused(where: str, expected: str, got: Any) -> RefusedError:
    """Return the refusal of a value that can't be had here."""
    text = f"{where}: expected {expected}, got {got!r:.80}: nothing else can be had here; leave it out"
    return RefusedError(400, text, "unsupported", where.partition(".")[0])


def text_of(content: Any, where: str, note: Note, *kinds: str) -> str:
    """Return the text of a content: a text, or a list of parts, which must be of one of ``kinds``.

    Raises:
        RefusedError: it is malformed, or one is not.
    """
    parts = [] if isinstance(content, str) else read_all(content, _Part, where, note)
    for part in parts:
        if part.type not in kinds:
            raise refused(where, f"parts of type {' or '.join(kinds)}", part.type)
    return content if isinstance(content, str) else "".join(part.text for part in parts)


def chat_body(asked: Body, own: frozenset[str], messages: list[Body], tools: list[Body], **more: Any) -> Body:
    """Return the body of a chat. It has the fields of the request, apart from the dialect's ``own``, and ``more``.

    Raises:
        RefusedError: the request asks for several answers.
    """
    if asked.get("n") not in (None, 1):
        raise refused("n", "1", asked["n"])
    rest = {name: value for name, value in asked.items() if name not in own}
    return {**rest, **more, "messages": _merged(messages), "tools": tools}


def settings_of(asked: Body, place: str, note: Note, **renamed: str) -> Body:
    """Return what a chat reads of the object at ``place``, as ``renamed``, and its ``format``. ``note`` gets the rest.

    Raises:
        RefusedError: it is no object.
    """
    found: Body = {}
    for name, value in read(asked.get(place) or {}, dict[str, Any], place).items():
        if name in renamed:
            found[renamed[name]] = value
        elif name == "format" and isinstance(value, dict):
            schema = {"json_schema": value} if value.get("type") == "json_schema" else {}
            found["response_format"] = {"type": value.get("type"), **schema}
        else:
            note(f"{place}.{name}", value)
    return found


def _merged(messages: Iterable[Body]) -> list[Body]:
    """Return messages as most chat templates take them: one system message, at the beginning, and no two of the user
    that follow each other. Later system messages are the user's, in the tags in which Claude Code wrote them before.
    """
    found: list[Body] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        last = found[-1]["role"] if found else None
        if role == "system" and last not in ("system", None):
            role, content = "user", f"<system-reminder>\n{content}\n</system-reminder>"
        if role == last and role in ("system", "user"):
            found[-1] = {"role": role, "content": f"{found[-1]['content']}\n\n{content}"}
        else:
            found.append({**message, "role": role, "content": content})
    return found


def function_tool(name: str, description: str | None, parameters: Body | None) -> Body:
    """Return a tool of a chat."""
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def called(call_id: str, name: str, arguments: str) -> Body:
    """Return a tool call of a chat."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def growing(
    now: Sequence[Body], told: Sequence[Body], *, is_whole: bool
) -> Iterator[tuple[int, Body, Body | None, bool]]:
    """Yield the blocks of an answer that a client may lack something of: their place, the block, what the client has of
    it, None for nothing, and whether it ends. All but the last of a list have ended.
    """
    for place in range(max(0, len(told) - 1), len(now)):
        yield place, now[place], told[place] if place < len(told) else None, is_whole or place < len(now) - 1


def server_sent(event: Body) -> bytes:
    """Return an event under the name of its type."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
