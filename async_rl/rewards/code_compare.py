"""Is what a program put out what was expected? Pure, in the trusted process; all input is hostile.

Colossal-RL compares in six steps, the first that agrees wins: whole texts, lines, lists of lines, the same without
blank lines, numbers that are close, and last the *sets* of the lines' tokens. By the last step a program that prints
both YES and NO passes every test with several answers, so it is left out unless asked for.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

Compare = Literal["ordered", "cascade"]

RELATIVE_TOLERANCE = 1e-5
ABSOLUTE_TOLERANCE = 1e-8
"""Of numbers of which one at least is no integer; numpy.allclose's, as Colossal-RL has it."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MAX_NUMBER_CHARS = 400
_MOST_TIMES_LONGER, _SPARE_CHARS = 4, 1 << 16


def outputs_agree(expected: str, output: str, *, compare: Compare) -> bool:
    """Whether the text that a script printed is right.

    Space at the ends of lines and blank lines don't count. Then lines must agree token by token: as text, or as
    numbers that are close where one is no integer. ``cascade`` takes lines and tokens in any order, too.
    """
    if _is_too_long(len(output), len(expected)):
        return False
    if expected.strip() == output.strip():
        return True
    expected_lines, lines = _lines(expected), _lines(output)
    if len(lines) == len(expected_lines) and all(map(_line_agrees, expected_lines, lines)):
        return True
    return compare == "cascade" and {frozenset(line) for line in lines} == {frozenset(line) for line in expected_lines}


def values_agree(expected: Any, answer: bytes, *, compare: Compare) -> bool:
    """Whether the value that a function returned is right. ``answer`` is its JSON.

    Equal, or equal to the single item of ``expected``, for some data sets wrap it in a list; ``cascade`` takes the
    first of several, too.
    """
    if _is_too_long(len(answer), len(json.dumps(expected))):
        return False
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    if value == expected:
        return True
    if not isinstance(expected, list) or not expected or (compare == "ordered" and len(expected) > 1):
        return False
    return value == expected[0]


def _is_too_long(length: int, expected_length: int) -> bool:
    """So much longer that it can't be right; comparing megabytes would stall whoever waits for the interpreter."""
    return length > _MOST_TIMES_LONGER * expected_length + _SPARE_CHARS


def _lines(text: str) -> list[list[str]]:
    """The tokens of each line that has any."""
    return [tokens for line in text.split("\n") if (tokens := line.split())]


def _line_agrees(expected: list[str], tokens: list[str]) -> bool:
    return len(expected) == len(tokens) and all(map(_token_agrees, expected, tokens))


def _token_agrees(expected: str, token: str) -> bool:
    if expected == token:
        return True
    if max(len(expected), len(token)) > _MAX_NUMBER_CHARS:
        return False
    if not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(token):
        return False
    if _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(token):
        return False  # integers are exact; "007" is not "7"
    wanted, got = float(expected), float(token)
    if not (math.isfinite(wanted) and math.isfinite(got)):
        return False
    return abs(wanted - got) <= ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(wanted)
