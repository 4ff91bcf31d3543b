"""How messages call the values of a dataset's rows, and the values of tables that JSON has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TRUTHS: Mapping[str | float, bool] = {1: True, 0: False, "1": True, "0": False, "true": True, "false": False}


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


def truth(value: Any) -> bool | None:
    """Return what ``value`` says: true or false, 1 or 0, or one of these as text, as CSV has it. None if it is another
    value.
    """
    named = value.lower() if isinstance(value, str) else value
    return _TRUTHS.get(named) if isinstance(named, str | int | float) else None


def is_absent(value: Any) -> bool:
    """Return whether a row with ``value`` in a column counts as one without the column: it is null, empty text or an
    empty list, which CSV has as text.
    """
    return value in (None, "", [], "[]")


def type_name(value: Any) -> str:
    """Return the name of the type of ``value``, for messages. It is Arrow's if Python has no such type."""
    return value.type if isinstance(value, Unreadable) else type(value).__name__
