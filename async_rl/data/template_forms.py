"""In which form a chat template reads messages: found by trying it, so that the same row works with every template.

People write a content as text, as a list of text parts or, with tool calls, as null, and the arguments of a tool call
as an object or as JSON text (OpenAI's form). A template reads some of these. Given another, it fails, writes Python's
``None`` or a list into the text, encodes JSON twice, or leaves the words out. ``apply_template`` gives each template
the form that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

_WORD, _NAME, _KEY, _VALUE = "bluebell", "pick_flowers", "meadow", "buttercup"
"""Words that no template contains."""
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
    """

    needs_parts: bool = False
    reads_calls: bool = False
    empty_content: str | None = ""
    arguments_as_text: bool = False


@cache
def forms_of(template: str) -> Forms:
    """Return the form in which ``template`` reads messages."""
    needs_parts = not _has_word(template, _WORD) and _has_word(template, _as_parts(_WORD))
    for as_text, empty in product((False, True), ("", None)):
        forms = Forms(needs_parts, True, empty, as_text)
        called = {"role": "assistant", "content": None, "tool_calls": [_call({_KEY: _VALUE})]}
        text = _rendered(template, [_asked(needs_parts), _adapted(called, forms)])
        shown = text.rpartition(_WORD)[2]
        # A quote with a backslash is JSON that was encoded twice; single quotes are Python's, where text is expected.
        if all(word in shown for word in (_NAME, _KEY, _VALUE)) and not any(
            bad in shown for bad in ('\\"', _AS_PYTHON)
        ):
            return forms
    return Forms(needs_parts)


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


def _adapted(message: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    found = dict(message)
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_adapted_call(call, forms) for call in calls]
    text = joined_text(found.get("content") or "")
    if text is None:
        return found
    if not text and found.get("tool_calls"):
        found["content"] = forms.empty_content
    elif "content" in found or not found.get("tool_calls"):
        found["content"] = text
    if forms.needs_parts and isinstance(content := found.get("content"), str):
        found["content"] = _as_parts(content)
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


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "000000001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _asked(as_parts: bool) -> dict[str, Any]:
    return {"role": "user", "content": _as_parts(_WORD) if as_parts else _WORD}


def _has_word(template: str, content: Any) -> bool:
    return _WORD in _rendered(template, [{"role": "user", "content": content}]).replace(f"'{_WORD}'", "")


def _rendered(template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the rendered messages. Empty if the template refuses them, by whatever its author wrote."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    try:
        texts, _ = render([list(messages)], chat_template=template, tools=_TOOLS, **marks)
    except Exception:
        return ""
    return str(texts[0])
