"""A code row's tests, checked, and whether what a program put out is what a test expects. Pure.

Tests are read when data is loaded and when an answer is graded. ``test_cases`` is ``{"inputs": [...], "outputs":
[...]}``, or that as JSON text, with ``fn_name`` in it or beside it for tests that call a function.

Outputs are compared in the trusted process; all of them are hostile. Colossal-RL compares in six steps, the first that
agrees wins: whole texts, lines, lists of lines, the same without blank lines, numbers that are close, and last the
*sets* of the lines' tokens. By the last step a program that prints both YES and NO passes every test with several
answers, so it is left out unless asked for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Compare = Literal["ordered", "cascade"]

RELATIVE_TOLERANCE = 1e-5
ABSOLUTE_TOLERANCE = 1e-8
"""Of numbers of which one at least is no integer; numpy.allclose's, as Colossal-RL has it."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MAX_NUMBER_CHARS = 400
_MOST_TIMES_LONGER, _SPARE_CHARS = 4, 1 << 16


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test.

    For a program, ``given`` is standard input and ``expected`` standard output, both text. For a function, ``given`` is
    a JSON list of arguments and ``expected`` the return value.
    """

    given: str
    expected: Any


@dataclass(frozen=True, slots=True)
class CodeTests:
    """At least one test; ``function`` is the name of the function to call, None for scripts."""

    tests: tuple[CodeTest, ...]
    function: str | None


def parse_tests(reward_data: Mapping[str, Any]) -> CodeTests:
    """The tests of one row.

    A script's input and output may be a list of lines. A function's arguments may be a list, or text with one JSON
    value a line; what it returns may be any value but text, or JSON text.

    Raises:
        ValueError: it has none, or they are malformed; the message says which.
    """
    cases = reward_data.get("test_cases")
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except ValueError as error:
            raise ValueError(f"test_cases: expected an object or JSON text, got other text ({error})") from None
    if not isinstance(cases, dict):
        raise ValueError(f'test_cases: expected {{"inputs": [...], "outputs": [...]}}, got {_short(cases)}')
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"test_cases: expected inputs and outputs, lists of one length above 0, got {_length(inputs)} inputs and "
            f"{_length(outputs)} outputs"
        )
    function = cases.get("fn_name", reward_data.get("fn_name"))
    if function is None:
        return CodeTests(tuple(_script_test(*pair, i) for i, pair in enumerate(zip(inputs, outputs))), None)
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"fn_name: expected the name of a function, got {_short(function)}")
    return CodeTests(tuple(_call_test(*pair, i) for i, pair in enumerate(zip(inputs, outputs))), function)


def _script_test(given: Any, expected: Any, index: int) -> CodeTest:
    texts: list[str] = []
    for name, value in (("inputs", given), ("outputs", expected)):
        lines = [value] if isinstance(value, str) else value
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"test_cases.{name}[{index}]: expected text or a list of lines, got {_short(value)}")
        texts.append("\n".join(lines))
    return CodeTest(texts[0], texts[1])


def _call_test(given: Any, expected: Any, index: int) -> CodeTest:
    try:
        arguments = (
            [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
        )
    except ValueError as error:
        raise ValueError(
            f"test_cases.inputs[{index}]: expected one JSON value a line, one for each argument, got {_short(given)} "
            f"({error})"
        ) from None
    if not isinstance(arguments, list):
        raise ValueError(f"test_cases.inputs[{index}]: expected a list of arguments, got {_short(given)}")
    try:
        value = json.loads(expected) if isinstance(expected, str) else expected
    except ValueError as error:
        raise ValueError(
            f"test_cases.outputs[{index}]: expected JSON, got {_short(expected)} ({error}); text needs its quotes"
        ) from None
    return CodeTest(json.dumps(arguments), value)


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no list of"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


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
