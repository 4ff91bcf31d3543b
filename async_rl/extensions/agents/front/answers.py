"""What a chat's answer says: thoughts, text and tool calls, read from what was sampled, special tokens included."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_rl.data.template_forms import call_arguments, called_function
from async_rl.extensions.agents.front.forms import CALLS, CONTENT, FORMS, PLAIN, THINK, THINK_END, THOUGHTS, Form

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

_ASKED = {"role": "user", "content": "Which flowers grow there?"}
_NAME, _ARGUMENTS = "pick_flowers", {"place": "meadow", "count": 7, "more": {"colours": ["red", "blue"]}}
_TYPES = {"place": "string", "count": "integer", "more": "object"}
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Picks flowers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": name} for name, kind in _TYPES.items()},
            "required": list(_TYPES),
        },
    },
}
"""A tool of ours, which a chat template is asked to write a call of."""
_EXAMPLES: Mapping[str, Any] = {
    "string": "a place", "integer": 7, "number": 0.5, "boolean": True, "array": ["red", "blue"], "object": {"more": 1},
}  # fmt: skip
"""A value of each type of JSON schema."""
_MALFORMED = (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError)
"""What the parser raises for a text that is not in its form."""
_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer in parts. ``calls`` are pairs of a tool's name and its arguments as JSON text."""

    content: str
    thoughts: str | None = None
    calls: tuple[tuple[str, str], ...] = ()


class _NotReadError(Exception):
    """A text is not in the form, or not to its end."""


Write = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Returns a conversation, with tools, as a chat template writes it."""


def form_of(own: Form | None, write: Write) -> Form | None:
    """Return the form of the model's tool calls: the first that reads a call that its chat template has written.

    ``own`` is the response template that the tokenizer has itself, if any. It is tried first.

    None: the template writes no call, or one that no form reads.
    """
    forms = [*filter(None, [own]), *FORMS.values()]
    return next((form for form in forms if _reads_back(form, write, [TOOL], _call(_NAME, _ARGUMENTS))), None)


def unread_tools(form: Form, write: Write, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the tools whose calls the form does not read back, as the chat template writes them.

    What is no function has that of its type.
    """
    found: list[str] = []
    for tool in tools:
        name = called_function(tool).get("name")
        if not name or not isinstance(name, str) or not _reads_back(form, write, tools, example_call(tool)):
            found.append(str(name or tool.get("type")))
    return found


def example_call(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message that calls a tool, with arguments that are as its schema says, as far as their types go."""
    function = called_function(tool)
    schemas = (function.get("parameters") or {}).get("properties") or {}
    return _call(str(function.get("name")), {name: _example_of(schema) for name, schema in schemas.items()})


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    call = {"id": "000000001", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", CALLS: [call]}


def _example_of(schema: Any) -> Any:
    while isinstance(schema, dict) and (choices := schema.get("anyOf") or schema.get("oneOf")):
        schema = choices[0]
    kind = schema.get("type") if isinstance(schema, dict) else None
    kind = kind[0] if isinstance(kind, list) and kind else kind
    return schema["enum"][0] if kind and schema.get("enum") else _EXAMPLES.get(str(kind), "a place")


def _reads_back(form: Form, write: Write, tools: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> bool:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    called = message[CALLS][0]["function"]
    try:
        text = write([_ASKED, message], tools)
    except Exception:  # the template's own: it refuses tool calls
        return False
    try:
        answer: str = load_response_template(dict(form)).truncate_past_last_anchor(text)
        calls = _read(form, answer, "", tools).calls
    except (_NotReadError, ValueError):
        return False
    return answer != text and [{"name": one, "arguments": json.loads(given)} for one, given in calls] == [called]


def parse_answer(
    form: Form | None, text: str, prompt: str, tools: Sequence[Mapping[str, Any]] | None, end: str = ""
) -> Parsed:  # fmt: skip
    """Split an answer into thoughts, text and tool calls.

    An answer with a malformed call stays text, so that the agent sees what the model wrote.

    Args:
        form: the model's; None: thoughts are what stands before ``</think>``, and there are no calls.
        text: the answer with its special tokens, but without the one that ended it.
        prompt: the end of the prompt, special tokens included: it may have opened the thoughts.
        tools: those that the request names. Without any, no call is read.
        end: the text of the token that ended the answer, which a form may need. The model may leave other marks out.
    """
    silent = None if form is None else _silent(form)
    for one, given, ended in ((form, tools, end), (form, tools, ""), (silent, (), ""), (PLAIN, (), "")):
        if one is not None and given is not None:
            with suppress(_NotReadError):
                return _read(one, text, prompt, given, ended)
    return Parsed(text)


def _silent(form: Form) -> Form:
    """Return the form without calls."""
    return {**form, "fields": {name: field for name, field in form["fields"].items() if name != CALLS}}


def _parser(form: Form, prompt: str, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, ResponseTemplate, str]:
    """Return transformers' parser behind the prompt, its template, and what the prompt opens that it does not see."""
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import load_response_template

    spec = load_response_template(dict(form))
    begun = spec.truncate_past_last_anchor(prompt)
    parser = ResponseParser(spec, "" if begun == prompt else prompt, tools=[dict(tool) for tool in tools])
    is_seen = any(event["field"] in THOUGHTS for event in parser.initial_events[-1:])
    opens = [field.open_re for name, field in spec.fields.items() if name in THOUGHTS and field.open_re is not None]
    is_opened = prompt.rstrip().endswith(THINK) and any(one.fullmatch(THINK) for one in opens)
    return parser, spec, THINK if is_opened and not is_seen else ""


def _read(form: Form, text: str, prompt: str, tools: Sequence[Mapping[str, Any]], end: str = "") -> Parsed:
    parser, spec, opened = _parser(form, prompt, tools)
    text = (opened if THINK_END in text else "") + text + end
    try:
        events = [*parser.initial_events, *parser.feed(text)]
        message, last = parser.finalize()
        calls = tuple(_calls(message.get(CALLS, [])))
    except _MALFORMED as error:
        raise _NotReadError from error
    for event in (event for event in last if event["type"] == "region_close"):
        field = spec.fields[event["field"]]
        # What stands before a thought without an end may have been told.
        if field.name in THOUGHTS and not end and (message.get(CONTENT) or message.get(field.name) != event["value"]):
            continue
        # A pattern waits for more at the end of the text. JSON that is whole is no part of a call.
        is_closed = field.close_re is not None and any(m.end() == len(text) for m in field.close_re.finditer(text))
        if not is_closed and field.name != CONTENT and field.content != "json":
            raise _NotReadError
    content = str(message.get(CONTENT, "")).removesuffix(end)
    thoughts = next((str(message[name]).strip("\n") for name in THOUGHTS if name in message), None)
    if not (content or calls or thoughts) and text:
        raise _NotReadError
    # Lines around thoughts and calls are no part of the content, even if the thoughts are empty.
    is_all = not calls and not any(event["field"] in THOUGHTS for event in events)
    return Parsed(content if is_all else content.strip("\n"), thoughts or None, calls)


def begun_answer(
    form: Form | None, text: str, prompt: str, tools: Sequence[Mapping[str, Any]] | None
) -> Parsed | None:  # fmt: skip
    """Return what ``parse_answer`` reads of any answer that begins with ``text``; None if nothing can be said now.

    transformers' parser holds back what may become a mark, and is enough for that. But ``parse_answer`` takes back what
    is malformed, and trims. So thoughts count when they have ended, and line breaks when something follows them; from a
    call on, or from thoughts behind a text, nothing does.
    """
    shown = PLAIN if form is None else form if tools is not None else _silent(form)
    parser, _, opened = _parser(shown, prompt, tools or ())
    content = thoughts = ""
    try:
        events = [*parser.initial_events, *parser.feed(opened + text)]
    except _MALFORMED:
        return None
    for kind, name, event in ((event["type"], event["field"], event) for event in events):
        if kind == "region_open" and (name == CALLS or (name in THOUGHTS and content.strip("\n"))):
            break
        if name == CONTENT and kind == "region_chunk":
            content += event["text"]
        elif name in THOUGHTS and kind == "region_close":
            thoughts += event["value"]
    content = content.lstrip("\n") if thoughts else content
    return Parsed("" if content[:1] == "\n" else content.rstrip("\n"), thoughts.strip("\n") or None)


def _calls(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of each call, as JSON text. Raises ValueError for what is no call."""
    for call in found:
        if isinstance(text := call["function"], str):
            yield from _python_calls(text)
            continue
        name, arguments = called_function(call).get("name"), call_arguments(call)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise ValueError(f"expected a call with a name and arguments, got {call!r:.80}")
        yield name, json.dumps(arguments or {})


def _python_calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield the calls in ``[name(key=value, ...), ...]``, whose values are Python's literals or JSON.

    Raises:
        SyntaxError, ValueError, TypeError: it is no such text, or JSON has no such value.
    """
    listed = _JsonNames().visit(ast.parse(text.strip(), mode="eval")).body
    for call in listed.elts if isinstance(listed, ast.List) else [listed]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(f"expected calls with named arguments, got {text!r:.80}")
        yield ast.unparse(call.func), json.dumps({str(one.arg): ast.literal_eval(one.value) for one in call.keywords})


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


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
