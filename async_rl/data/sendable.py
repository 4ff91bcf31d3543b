"""Decides which fields of a row can be sent to generators, and drops the others by name.

Messages hold what JSON can hold: text, numbers, true, false, null, lists and objects. Integers have at most 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.data.values import type_name

MAX_NESTING = 6
"""Maximum depth of nested lists and objects in one field of a row. Messages to generators can't hold much more."""

Dropped = list[tuple[list[str], str]]
"""What was dropped: the names from the column inwards, and the reason, such as ``a value of the type date``."""


def split_sendable(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Dropped]:
    """Return the fields that can be sent, and what was dropped.

    Of an object only the values that can't be sent are dropped, of a list all.
    """
    dropped: Dropped = []
    return _kept(fields, [], dropped), dropped


def _kept(fields: Mapping[str, Any], path: list[str], dropped: Dropped) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        here = [*path, name]
        if reason := _why_no_text(name):
            dropped.append(([*path, ascii(name)], f"a name that is {reason}"))
        elif isinstance(value, dict) and len(here) <= MAX_NESTING and all(isinstance(key, str) for key in value):
            kept[name] = _kept(value, here, dropped)
        elif reason := why_unsendable(value, len(path)):
            dropped.append((here, reason))
        else:
            kept[name] = value
    return kept


def why_unsendable(value: Any, depth: int = 0) -> str:
    """Return why ``value``, which ``depth`` lists and objects contain, can't be sent. Empty if it can.

    The result is a noun for messages, such as ``an integer of more than 64 bits``.
    """
    if isinstance(value, str):
        return _why_no_text(value)
    if value is None or isinstance(value, float):  # bool is an int
        return ""
    if isinstance(value, int):
        return "" if -(1 << 63) <= value < 1 << 64 else "an integer of more than 64 bits"
    if not isinstance(value, dict | list | tuple):
        return f"a value of the type {type_name(value)}"
    if depth >= MAX_NESTING:
        return f"a value of more than {MAX_NESTING} levels of nested lists and objects"
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return "an object with keys that are not text"
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return next((reason for item in items if (reason := why_unsendable(item, depth + 1))), "")


def _why_no_text(text: str) -> str:
    """Return why ``text`` can't be sent. Empty if it can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "text that is not Unicode (a lone surrogate)"
    return ""
