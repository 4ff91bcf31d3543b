"""How messages call the values of a dataset's rows, and the values of tables that JSON has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value of a table that is no JSON value. ``type`` is its type in Arrow's words, such as ``timestamp[ns]``."""

    type: str


def kind(value: Any) -> str:
    """Return a short description of ``value``, the value of a row, for error messages, such as ``a list of 3``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int | float):
        return f"the number {str(value)[:40]}"
    return "an object" if isinstance(value, dict) else f"a value of the type {type_name(value)}"


def type_name(value: Any) -> str:
    """Return the name of the type of ``value``, for messages. It is Arrow's if Python has no such type."""
    return value.type if isinstance(value, Unreadable) else type(value).__name__
