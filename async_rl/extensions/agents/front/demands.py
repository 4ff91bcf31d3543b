"""Answers that must have a form: a call of a tool, or JSON. They are sampled again until one has it.

To choose among samples changes the distribution that the run trains on, so such an answer is context, and no target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from async_rl.data.template_forms import called_function
from async_rl.extensions.agents.front.dialects import read, settings_of
from async_rl.extensions.agents.front.requests import Note, RefusedError

TRIES = 8
"""How often an answer is sampled until it has the form."""
FIELDS = frozenset({"tool_choice", "response_format"})
Demand = Callable[[Mapping[str, Any]], bool]
"""Returns whether a choice of an answer has the form that its request asks for."""


class _Schema(msgspec.Struct):
    required: list[str] = []


def demand_of(raw: Mapping[str, Any], note: Note) -> Demand | None:
    """Return what the body of a chat insists on; None if it takes any answer. ``note`` gets what has no effect on that.

    Raises:
        RefusedError: it insists on something else.
    """
    choice: Any = raw.get("tool_choice") or "auto"
    form: Any = raw.get("response_format") or {"type": "text"}
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function"):
        if not raw.get("tools"):
            raise _refused("tool_choice", choice)
        wanted = called_function(choice).get("name")
        return lambda answer: bool(names := _called(answer)) and (wanted is None or {*names} == {wanted})
    if choice not in ("auto", "none"):
        raise _refused("tool_choice", choice)
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if not isinstance(form, dict) or kind not in ("json_object", "json_schema"):
        raise _refused("response_format", form)
    schema = settings_of(form, "json_schema", note, type="type", schema="schema").get("schema") or {}
    keys = read(schema, _Schema, "response_format").required
    return lambda answer: _is_object(answer["message"].get("content"), keys)


def _refused(name: str, got: Any) -> RefusedError:
    return RefusedError(400, f"{name}: expected one of OpenAI's API, got {got!r:.80}", "unsupported", name)


def _called(answer: Mapping[str, Any]) -> list[str]:
    calls = answer["message"].get("tool_calls", ()) if answer["finish_reason"] == "tool_calls" else ()
    return [call["function"]["name"] for call in calls]


def _is_object(text: str | None, keys: Any) -> bool:
    try:
        found = json.loads(text or "")
    except ValueError:
        return False
    return isinstance(found, dict) and all(key in found for key in keys)
