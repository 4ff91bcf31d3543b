"""Make text safe to print on a terminal: show control characters as escapes, so that they have no effect.

Ids, host names and messages come from other machines, and logs quote what a model wrote. An escape sequence in them
could move the cursor, hide lines or change the terminal's title. All code that prints or logs calls this module.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping
from typing import Any

_HARMLESS = frozenset("\n\t")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories whose characters ``visible`` escapes: control and format characters (such as bidirectional
overrides), surrogates, and separators of lines and paragraphs."""


def visible(text: str) -> str:
    """Return ``text`` with control characters, except line breaks and tabs, as escapes (``\\x1b``, ``\\u202e``)."""
    if text.isprintable():
        return text
    return "".join(c if c in _HARMLESS or unicodedata.category(c) not in _HIDDEN else _escaped(c) for c in text)


def visible_values(value: Any) -> Any:
    """Return a copy of plain data (dicts, lists, strings, numbers) that is safe to print.

    In every string, also in keys, control characters are shown as escapes (see ``visible``)."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible_values(key): visible_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [visible_values(item) for item in value]
    return value


class VisibleFormatter(logging.Formatter):
    """A logging formatter that shows control characters in a log line as escapes (see ``visible``)."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_visibly(level: int | str, form: str) -> None:
    """Set up logging to standard error, with control characters escaped. Do nothing if logging is set up already.

    Args:
        level: the lowest level that is logged.
        form: the format string for ``logging.Formatter``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode("ascii")
