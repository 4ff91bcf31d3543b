"""Each field of the three APIs' requests, as OpenAI's and Anthropic's packages have them: what becomes of it here.

A field is honoured: it changes the call or the answer; or left out and named; or refused by name. None is dropped in
silence. The fields come from the packages' types, down to where a whole object is refused or left out, and their kinds
from the tables of ``front/requests.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import httpx
import msgspec
import numpy as np
import pydantic
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from typing_extensions import TypedDict, is_typeddict

from async_rl.extensions.agents.front.chat import ChatRenderer
from async_rl.extensions.agents.front.messages import Call, Reply
from async_rl.extensions.agents.front.requests import NEUTRAL, SAMPLED, VARIABLES, RequestRules, has_no_effect
from async_rl.extensions.agents.front.server import Calls, application
from tests.data.public_templates import tokenizer_of
from tests.extensions.agents.test_conversations import CALL, TOOLS

CHATS, MESSAGES, RESPONSES = (f"/v1/{name}" for name in ("chat/completions", "messages", "responses"))
SAID = ["<think>\nhm\n</think>\n\n5 x", '{"a": 1}', '{"x": 1}', CALL.replace("add", "x")]
"""What the model says in turn, so that an answer which must have a form is another one."""
FUNCTION = {**TOOLS[0]["function"], "name": "x"}
USER = {"role": "user", "content": "a"}
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    CHATS: (CompletionCreateParamsBase, {
        "model": "policy", "messages": [USER], "tools": [{"type": "function", "function": FUNCTION}], "stream": True,
    }),
    MESSAGES: (MessageCreateParamsBase, {
        "model": "policy", "max_tokens": 50, "messages": [USER],
        "tools": [{"name": "x", "input_schema": FUNCTION["parameters"]}],
    }),
    RESPONSES: (ResponseCreateParamsBase, {
        "model": "policy", "input": [USER], "tools": [{"type": "function", **FUNCTION}],
    }),
}  # fmt: skip
"""By the path: the type of a request, and one to which each field is added."""
LAST = {
    CHATS: {"role": "tool", "tool_call_id": "c", "content": "5"},
    MESSAGES: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]},
    RESPONSES: {"type": "function_call_output", "call_id": "c", "output": "5"},
}
"""What follows a message on trial, whose thoughts the template then still writes."""
DEFAULTS = {"type": ("message", "custom"), "format": ({"type": "text"},), "tool_choice": ({"type": "auto"},)}
"""Values that mean the same as none, in addition to those of the tables."""


class Scripted(Calls):
    """A generator that answers each call at once, and keeps it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.asked = tokenizer, []

    def check_key(self, key: str) -> None: ...
    def is_open(self, key: str) -> bool:
        return True

    @contextlib.contextmanager
    def numbered(self, key: str, count: int) -> Iterator[list[int]]:
        yield list(range(count))

    async def answers(self, calls: Sequence[Any], request: Any, hear: Any = None) -> list[Any]:
        self.asked += calls
        text = SAID[(len(self.asked) - 1) % len(SAID)]
        ids = np.array(self.tokenizer.encode(f"{text}<|im_end|>"), "<i4").tobytes()
        return [Reply(call.call, ids, bytes(len(ids)), bytes(len(ids)), "stop", 1, text) for call in calls]

    def send(self, message: Any) -> None: ...


class Outcome(NamedTuple):
    """What a request comes to: the calls and the answer, the fields that were named, and the one it is refused for."""

    effect: Any
    named: frozenset[str]
    refused_for: str | None


class Front:
    """The front in this process, with a template that reads all variables."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer_of("qwen3")
        reads = "".join(f"{{{{- {name} }}}}," for name in VARIABLES)
        ids = "{% for m in messages %}{{ m.name }},{{ m.tool_call_id }},{% for c in m.tool_calls or [] %}{{ c.id }},"
        ends = "{% endfor %}{% endfor %}"
        self.tokenizer.chat_template = f"{reads}{ids}{ends}{self.tokenizer.chat_template}"
        self.renderer, self.named = ChatRenderer(self.tokenizer, {}), list[str]()
        self.runner = asyncio.Runner()

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and "which has no effect" in record.msg:
            self.named.append(str(record.args[0]))
        return False

    def ask(self, path: str, body: Any) -> Outcome:
        self.named.clear()
        status, answer, calls = self.runner.run(self._ask(path, body))
        refused_for = answer["error"]["param"] if status in (400, 404) else None
        assert status in (200, 422) or refused_for, answer
        assert len(set(self.named)) == len(self.named)
        echoed = {"tools": None, "tool_choice": None} if isinstance(answer, dict) else {}
        assert all(set(call.without_effect) == set(self.named) for call in calls)
        calls = [msgspec.structs.replace(call, said=None, without_effect=()) for call in calls]
        return Outcome((answer | echoed if echoed else answer, calls), frozenset(self.named), refused_for)

    async def _ask(self, path: str, body: Any) -> tuple[int, Any, list[Call]]:
        loaded, calls = asyncio.get_running_loop().create_future(), Scripted(self.tokenizer)
        loaded.set_result(self.renderer)
        app = httpx.ASGITransport(application(calls, RequestRules("tiny", frozenset({"y"})), 4096, loaded))
        async with httpx.AsyncClient(transport=app, base_url="http://front") as client:
            reply = await client.post(path, json=body)
        is_json = reply.headers["content-type"] == "application/json"
        return reply.status_code, reply.json() if is_json else reply.text, calls.asked


def bare(kind: Any) -> tuple[Any, bool]:
    """A type without its marks, and whether it is marked as required."""
    is_required = False
    while (origin := get_origin(kind)) in (Required, NotRequired, Annotated):
        is_required |= origin is Required
        kind = get_args(kind)[0]
    return kind, is_required


def fields_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def minimal(kind: Any) -> dict[str, Any]:
    """An object with what it must have, and its content."""
    hints = fields_of(kind).items()
    return {name: next(examples(hint))[0] for name, hint in hints if bare(hint)[1] or name == "content"}


Wrap = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def examples(kind: Any) -> Iterator[tuple[Any, Any, Wrap]]:
    """Values of a type: all of a closed one, two of another. Of an object also its type, and what makes it a value."""
    kind, _ = bare(kind)
    origin, args = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        yield minimal(kind), kind, _same
    elif origin is Union:
        yield from chain.from_iterable(
            examples(one) for one in args if not (str in args and get_origin(one) is Literal)
        )
    elif origin is dict:
        yield from (({"required": [value]}, None, _same) for value, _, _ in examples(args[1]))
    elif args and origin is not Literal:
        for value, inner, wrap in examples(args[0]):
            yield [value], inner, lambda value, wrap=wrap: [wrap(value)]
    elif kind is not type(None) and not (isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)):
        free = {bool: (True, False), int: (1, 2), float: (0.5, 0.25)}
        yield from ((value, None, _same) for value in args or free.get(kind, ("x", "y")))


def wrong_fields(front: Front, path: str, kind: Any, base: dict[str, Any]) -> Iterator[str]:
    """What is dropped in silence, or named or refused wrongly."""

    def of_object(kind: Any, least: Any, put: Wrap, where: tuple[str, ...], known: frozenset[str]) -> Iterator[str]:
        for name, hint in fields_of(kind).items():
            place, others = (*where, name), {one: value for one, value in least.items() if one != name}
            is_required, values = bare(hint)[1], list(examples(hint))
            is_sole = is_required and len(values) == 1
            if is_sole and values[0][1] is None:
                continue  # the name of a kind
            found = [front.ask(path, put({**others, name: value})) for value, _, _ in values]
            absent = [] if is_required else [front.ask(path, put(others))]
            for (value, inner, wrap), outcome in zip(values, found, strict=True):
                new, verdict = outcome.named - known, ""
                changes = any(one.effect != outcome.effect for one in absent or found)
                of_kind = [one for one in new if ": " in one]
                unknown = [one for one in new if not of_kind and not has_no_effect(one)]
                is_named = of_kind or any(one.rpartition(".")[2] in place for one in outcome.named)
                neutral = ({}, [{}], *{**NEUTRAL, **SAMPLED}.get(name, (False,)), *DEFAULTS.get(name, ()))
                if outcome.refused_for is not None:
                    verdict = "" if outcome.refused_for == place[0] else f"refused for {outcome.refused_for}"
                elif unknown:
                    verdict = f"{unknown} in no table"
                elif inner is None and is_named and changes and new:
                    verdict = "has an effect, and is said to have none"
                elif not (is_named or changes or is_sole or value in neutral or any(f"{name}." in one for one in new)):
                    verdict = "dropped in silence"
                if verdict:
                    yield f"{'.'.join(place)} = {value!r:.60}: {verdict}"
                elif inner is not None and outcome.refused_for is None and not is_named:
                    put_deeper = partial(_put, put, others, name, wrap)
                    yield from of_object(inner, minimal(inner), put_deeper, place, known | outcome.named)

    def whole(fields: dict[str, Any]) -> dict[str, Any]:
        (name,) = {"messages", "input"} & base.keys()
        said = fields.get(name)
        return {**fields, name: [USER, *said, LAST[path]]} if isinstance(said, list) else fields

    yield from of_object(kind, base, whole, (), frozenset())


def _put(put: Wrap, others: dict[str, Any], name: str, wrap: Wrap, fields: Any) -> Any:
    return put({**others, name: wrap(fields)})


@pytest.fixture
def front() -> Iterator[Front]:
    logger = logging.getLogger("async_rl.extensions.agents.front.server")
    found = Front()
    logger.addFilter(found)
    with found.runner:
        yield found
    logger.removeFilter(found)


@pytest.mark.parametrize("path", BASES)
def test_no_field_of_a_request_is_dropped_in_silence(front: Front, path: str):
    kind, base = BASES[path]
    wrong = list(wrong_fields(front, path, kind, base))
    assert not wrong, "\n".join(["decide in front/requests.py, or read it in the dialect:", *wrong])
    assert front.ask(path, base).effect != front.ask(path, {**base, "stream": not base.get("stream")}).effect


def test_a_field_of_a_newer_package_has_to_be_decided(front: Front):
    class Newer(TypedDict):
        mood: str
        stop: Literal["x"]

    assert list(wrong_fields(front, CHATS, Newer, BASES[CHATS][1])) == [
        f"mood = {value!r}: ['mood'] in no table" for value in "xy"
    ]
