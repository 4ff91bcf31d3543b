"""In which form a chat template reads messages: found by trying it, so that the same row works with every template.

People write a content as text, as a list of text parts or, with tool calls, as null, and the arguments of a tool call
as an object or as JSON text (OpenAI's form). A template reads some of these. Given another, it fails, writes Python's
``None`` or a list into the text, encodes JSON twice, or leaves the words out. ``apply_template`` gives each template
the form that it reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any

_WORD, _NAME, _KEY, _VALUE = "bluebell", "pick_flowers", "meadow", "buttercup"
_WORDS = ("marigold", "bluebell", "snowdrop", "buttercup")
"""Words that no template contains."""
_IN_PLACE = ("refusal", "audio", "function_call")
"""What a message of OpenAI's API may have in place of a content, and no template reads."""
_AS_PYTHON = str({_KEY: _VALUE})
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Pick.",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "Where."}}},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Forms:
    """The form in which a template reads messages.

    Attributes:
        needs_parts: whether a content must be a list of parts; else it must be text.
        reads_calls: whether it renders ``tool_calls``.
        empty_content: the content of a message that has only tool calls.
        arguments_as_text: whether the arguments of a tool call must be JSON text; else they must be an object.
        developer: the role of a developer's message: ``system`` if it renders only that one.
    """

    needs_parts: bool = False
    reads_calls: bool = False
    empty_content: str | None = ""
    arguments_as_text: bool = False
    developer: str = "developer"


@cache
def forms_of(template: str) -> Forms:
    """Return the form in which ``template`` reads messages."""
    needs_parts = not _has_word(template, _WORD) and _has_word(template, text_parts(_WORD))
    said = _asked(needs_parts)["content"]
    developer = next((role for role in ("developer", "system") if _has_word(template, said, role)), "developer")
    for as_text, empty in product((False, True), ("", None)):
        forms = Forms(needs_parts, True, empty, as_text, developer)
        called = {"role": "assistant", "content": None, "tool_calls": [_call({_KEY: _VALUE})]}
        text = _rendered(template, [_asked(needs_parts), _adapted(called, forms)])
        shown = text.rpartition(_WORD)[2]
        # A quote with a backslash is JSON that was encoded twice; single quotes are Python's, where text is expected.
        if all(word in shown for word in (_NAME, _KEY, _VALUE)) and not any(
            bad in shown for bad in ('\\"', _AS_PYTHON)
        ):
            return forms
    return Forms(needs_parts, developer=developer)


def adapted(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` in the form that ``template`` reads. Parts that are no text stay as they are."""
    return [_adapted(message, forms_of(template)) for message in messages]


def joined_text(content: Any) -> str | None:
    """Return the text of ``content``, which is text or a list of text parts. None if it is anything else."""
    if isinstance(content, str):
        return content
    texts = [_text_of(part) for part in content] if isinstance(content, list) else [None]
    return None if None in texts else "".join(text for text in texts if text is not None)


def called_function(call: Any) -> Mapping[str, Any]:
    """Return the inner object of a tool call, with the function's name and arguments. Empty if it is none."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner if isinstance(inner, dict) else {}


def call_arguments(call: Any) -> Any:
    """Return the arguments of a tool call as an object, if they are one or are the JSON text of one; else as they are.
    An empty text is no arguments.

    A call is ``{"function": {"name", "arguments"}}`` or only the inner object.
    """
    found = called_function(call).get("arguments")
    if not isinstance(found, str):
        return found
    if not found.strip():
        return {}
    try:
        parsed = json.loads(found)
    except ValueError:
        return found
    return parsed if isinstance(parsed, dict) else found


def with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """Return a tool call with other arguments."""
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": {**inner, "arguments": arguments}}
    return {**call, "arguments": arguments}


def why_lost(template: str, chat: Sequence[Mapping[str, Any]]) -> str:
    """Return which of ``chat``, messages in the form of ``template``, leaves no trace in its text, as the end of a
    sentence. Empty if all do, or if the template refuses the messages.

    Messages are asked about with words of ours in place of the contents, so what the template does with a certain text
    (it drops an earlier thought, strips a space) does not count. A part that is no text is left out on trial.
    """
    # None, of a content that is no text, counts as text here.
    shape = tuple(
        (one.get("role"), bool(str(joined_text(one.get("content") or "")).strip()), bool(one.get("tool_calls")))
        for one in chat
    )
    lost = _lost(template, shape)
    place = next((place for place in range(len(chat)) if place == lost or _loses_part(template, chat, place)), None)
    if place is None:
        return ""
    return (
        f"does not render {chat[place]!r:.80}, or a part of it, so it would be lost; give it a role that the template "
        f"reads, write the call as its content or the content as text, or use a model whose template renders it"
    )


def text_around(template: str, roles: Sequence[str], marks: Mapping[str, Any]) -> list[str]:
    """Return the texts before, between and behind the contents of a conversation of ``roles``. Empty if the template
    refuses it, or does not write each content once.

    ``marks`` are the template's variables for special tokens.
    """
    chat = [{"role": role, "content": word} for role, word in zip(roles, _WORDS, strict=False)]
    parts = re.split("|".join(_WORDS), _rendered(template, adapted(template, chat), tools=None, **marks))
    return parts if len(parts) == len(roles) + 1 else []


@lru_cache(maxsize=4096)
def _lost(template: str, shape: tuple[tuple[Any, bool, bool], ...]) -> int | None:
    """Return the number of the first message without a trace in a conversation of ``shape``: for each message its role,
    whether it has text, and whether it calls tools.

    An answer of text is not asked about: a template may write earlier ones in another way.
    """
    chat: list[dict[str, Any]] = []
    for place, (role, has_text, has_calls) in enumerate(shape):
        own = {} if role in ("system", "user", "assistant") else {"name": _NAME, "tool_call_id": _call({})["id"]}
        calls = {"tool_calls": [_call({_KEY: f"{_WORD}{place}x"})]} if has_calls else {}
        chat.append({"role": role, "content": f"{_WORD}{place}x" if has_text else "", **own, **calls})
    text = _rendered(template, adapted(template, chat)).lower()
    asked = [role != "assistant" if has_text else has_calls for role, has_text, has_calls in shape]
    lost = (place for place in range(len(shape)) if asked[place] and f"{_WORD}{place}x" not in text)
    return next(lost, None) if text else None


def _loses_part(template: str, chat: Sequence[Mapping[str, Any]], place: int) -> bool:
    """Return whether a part of a message that is no text leaves no trace in the template's text."""
    message = chat[place]
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    rests = [[one for one in parts if one is not part] or "" for part in parts if joined_text([part]) is None]
    chats = [[*chat[:place], {**message, "content": rest}, *chat[place + 1 :]] for rest in rests]
    text = _rendered(template, chat) if rests else ""
    is_instead = not content and not message.get("tool_calls") and any(message.get(key) for key in _IN_PLACE)
    return is_instead or (text != "" and text in [_rendered(template, one) for one in chats])


def _adapted(message: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    found = dict(message)
    if found.get("role") == "developer":
        found["role"] = forms.developer
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_adapted_call(call, forms) for call in calls]
    content = found.get("content")
    text = joined_text("" if content is None else content)
    if text is None:
        return found
    if not text and found.get("tool_calls"):
        found["content"] = forms.empty_content
    elif "content" in found or not found.get("tool_calls"):
        found["content"] = text
    if forms.needs_parts and isinstance(content := found.get("content"), str):
        found["content"] = text_parts(content)
    return found


def _adapted_call(call: Any, forms: Forms) -> Any:
    arguments = call_arguments(call)
    if not isinstance(arguments, dict):
        return call
    return with_arguments(call, json.dumps(arguments, ensure_ascii=False) if forms.arguments_as_text else arguments)


def _text_of(part: Any) -> str | None:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            return None


def text_parts(text: str) -> list[dict[str, str]]:
    """Return ``text`` as a content of one part."""
    return [{"type": "text", "text": text}]


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "000000001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _asked(as_parts: bool) -> dict[str, Any]:
    return {"role": "user", "content": text_parts(_WORD) if as_parts else _WORD}


def _has_word(template: str, content: Any, role: str = "user") -> bool:
    asked = {"role": "user", "content": _KEY if isinstance(content, str) else text_parts(_KEY)}
    chat = [{"role": role, "content": content}, *([] if role == "user" else [asked])]
    return _WORD in _rendered(template, chat).replace(f"'{_WORD}'", "")


def _rendered(template: str, messages: Sequence[Mapping[str, Any]], **marks: Any) -> str:
    """Return the rendered messages. Empty if the template refuses them, by whatever its author wrote.

    ``marks`` are the template's variables in place of ours for special tokens and for tools.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    ours = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "tools": _TOOLS}
    try:
        texts, _ = render([list(messages)], chat_template=template, **(ours | marks))
    except Exception:
        return ""
    return str(texts[0])
