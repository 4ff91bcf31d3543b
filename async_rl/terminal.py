"""Makes text safe for a terminal: control characters are shown as escapes, so that none takes effect.

Ids, host names and messages come from other machines, and logs quote what a model wrote. An escape sequence in them
could move the cursor, hide lines or change the terminal's title. Called by everything that prints or logs.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping
from typing import Any

_HARMLESS = frozenset("\n\t")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of control and format characters (bidirectional overrides are among them), of surrogates, and
of separators of lines and paragraphs."""


def visible(text: str) -> str:
    """Replace control characters, except line breaks and tabs, by their escapes (``\\x1b``, ``\\u202e``)."""
    if text.isprintable():
        return text
    return "".join(c if c in _HARMLESS or unicodedata.category(c) not in _HIDDEN else _escaped(c) for c in text)


def visible_values(value: Any) -> Any:
    """Apply ``visible`` to every text in plain data (maps, lists, text, numbers)."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible_values(key): visible_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [visible_values(item) for item in value]
    return value


class VisibleFormatter(logging.Formatter):
    """Formats a log record as text without control characters (see ``visible``)."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_visibly(level: int | str, form: str) -> None:
    """Log to standard error from ``level`` on, in the form of ``logging.Formatter``, unless it is set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode("ascii")
