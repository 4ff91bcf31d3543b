"""Reads the tests of a row for programs, and decides whether a program's output is right. No program is run here.

There are three forms: scripts, calls, and ``{"check": text}`` with ``def check(candidate)`` (``check_function``). Tests
are read when data is loaded and when a program is scored. A row's ``test_cases`` is ``{"inputs": [...],
"outputs": [...]}``, or JSON text of such an object. For tests that call a function, ``fn_name`` is a key of
``test_cases`` or of the row.

A program may print anything to deceive the comparison. Outputs are compared token by token. An integer must be exact,
and another number may differ by the test's tolerance. Colossal-RL compares in six steps and accepts an output if any
step accepts it. Its last step compares the *set* of tokens of each line. A program that prints both YES and NO would
pass many tests in that step, so it is used only if ``compare`` is ``cascade``.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from async_rl.extensions.code_rewards.check_function import CheckTests

Compare = Literal["tokens", "cascade"]

TOLERANCE = 1e-6
"""Default tolerance for numbers that are not integers, both absolute and relative to the expected number."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MAX_NUMBER_CHARS = 400
_MOST_TIMES_LONGER, _SPARE_CHARS = 4, 1 << 16


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test of a program.

    If the program is a script, ``given`` is the text on standard input and ``expected`` the text on standard output.
    If a function is called, ``given`` is a JSON list of arguments and ``expected`` is the return value.
    """

    given: str
    expected: Any


@dataclass(frozen=True, slots=True)
class CodeTests:
    """The tests of one row, at least one.

    ``function`` is the name of the function to call. It is None if the program is a script. A number that is not an
    integer may differ from the expected number by at most ``tolerance * max(1, abs(expected))``. With ``check``, the
    one test is that function, and ``tests`` has a placeholder for it.
    """

    tests: tuple[CodeTest, ...]
    function: str | None
    tolerance: float = TOLERANCE
    check: CheckTests | None = None


def parse_tests(reward_data: Mapping[str, Any]) -> CodeTests:
    """Read and check the tests in ``reward_data``, the fields of a row.

    For a script, an input or output is text or a list of lines. For a function, an input is a list of arguments, or
    text with one JSON value per line. An output is the return value, which is read as JSON if it is text. If unset,
    ``test_cases.tolerance`` is 1e-6.

    Raises:
        ValueError: the row has no tests, or a test is malformed. The message names the field.
    """
    cases = reward_data.get("test_cases")
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except ValueError as error:
            raise ValueError(
                f"test_cases: expected an object or JSON text, got text that is not JSON ({error})"
            ) from None
    if not isinstance(cases, dict):
        raise ValueError(f'test_cases: expected {{"inputs": [...], "outputs": [...]}}, got {_short(cases)}')
    if "check" in cases:
        return _check_tests(cases, cases.get("fn_name", reward_data.get("fn_name")))
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"test_cases: expected inputs and outputs, two lists of equal length that are not empty, got "
            f"{_length(inputs)} inputs and {_length(outputs)} outputs"
        )
    tolerance = cases.get("tolerance", TOLERANCE)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise ValueError(f"test_cases.tolerance: expected a number from 0 to below 1, got {_short(tolerance)}")
    function = cases.get("fn_name", reward_data.get("fn_name"))
    if function is None:
        tests = tuple(_script_test(*pair, i) for i, pair in enumerate(zip(inputs, outputs)))
        return CodeTests(tests, None, tolerance)
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"fn_name: expected the name of a function, got {_short(function)}")
    return CodeTests(tuple(_call_test(*pair, i) for i, pair in enumerate(zip(inputs, outputs))), function, tolerance)


def _check_tests(cases: Mapping[str, Any], function: Any) -> CodeTests:
    check, setup = cases["check"], cases.get("setup", "")
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"fn_name: expected the name of the function that check gets, got {_short(function)}")
    trees: list[ast.Module] = []
    for key, text in (("check", check), ("setup", setup)):
        try:
            trees.append(ast.parse(text))
        except (SyntaxError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"test_cases.{key}: expected Python text, got {_short(text)} ({error})") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in trees[0].body):
        raise ValueError(f"test_cases.check: expected Python text with def check(candidate), got {_short(check)}")
    return CodeTests((CodeTest("", None),), function, check=CheckTests(check, setup))


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
            f"test_cases.inputs[{index}]: expected one JSON value per line, one for each argument, got {_short(given)} "
            f"({error})"
        ) from None
    if not isinstance(arguments, list):
        raise ValueError(f"test_cases.inputs[{index}]: expected a list of arguments, got {_short(given)}")
    try:
        value = json.loads(expected) if isinstance(expected, str) else expected
    except ValueError as error:
        raise ValueError(
            f"test_cases.outputs[{index}]: expected JSON, got {_short(expected)} ({error}); write text in double quotes"
        ) from None
    return CodeTest(json.dumps(arguments), value)


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no list of"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def outputs_agree(expected: str, output: str, *, compare: Compare, tolerance: float = TOLERANCE) -> bool:
    """Return whether ``output``, the text that a script printed, is right.

    Tokens are separated by white space, which includes line breaks. The tokens must agree with those of ``expected``,
    in order. With ``compare = "cascade"``, lines and the tokens of a line may also be in any order.
    """
    if _is_too_long(len(output), len(expected)):
        return False
    expected_tokens, tokens = expected.split(), output.split()
    if len(tokens) == len(expected_tokens):
        pairs = zip(expected_tokens, tokens, strict=True)
        if all(_token_agrees(wanted, token, tolerance) for wanted, token in pairs):
            return True
    return compare == "cascade" and _sets_of_lines(output) == _sets_of_lines(expected)


def values_agree(expected: Any, answer: bytes, *, compare: Compare, tolerance: float = TOLERANCE) -> bool:
    """Return whether ``answer``, the JSON of the value that a function returned, is right.

    The value must equal ``expected``. Because some datasets wrap values in a list, it may also equal the only item of
    the list ``expected``, and with ``compare = "cascade"`` the first of several items.
    """
    if _is_too_long(len(answer), len(json.dumps(expected))):
        return False
    try:
        value = json.loads(answer)
        if _value_agrees(expected, value, tolerance):
            return True
        if not isinstance(expected, list) or not expected or (compare == "tokens" and len(expected) > 1):
            return False
        return _value_agrees(expected[0], value, tolerance)
    except (ValueError, RecursionError):
        return False


def _is_too_long(length: int, expected_length: int) -> bool:
    """Return whether an output of ``length`` characters is too long to be right.

    Such an output is not compared, because comparing megabytes would block other threads.
    """
    return length > _MOST_TIMES_LONGER * expected_length + _SPARE_CHARS


def _sets_of_lines(text: str) -> set[frozenset[str]]:
    """Turn each line into the set of its tokens, and return these sets, without those of blank lines.

    Texts that differ only in order or in repetitions have the same result.
    """
    return {frozenset(tokens) for line in text.split("\n") if (tokens := line.split())}


def _token_agrees(expected: str, token: str, tolerance: float) -> bool:
    if expected == token:
        return True
    if max(len(expected), len(token)) > _MAX_NUMBER_CHARS:
        return False
    if not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(token):
        return False
    if _INTEGER.fullmatch(expected):
        # "007" is not "7", and "7.0" is.
        return not _INTEGER.fullmatch(token) and Fraction(token) == int(expected)
    return _is_close(float(expected), float(token), tolerance)


def _value_agrees(expected: Any, value: Any, tolerance: float) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_value_agrees(wanted, item, tolerance) for wanted, item in zip(expected, value, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_value_agrees(wanted, value[key], tolerance) for key, wanted in expected.items())
        )
    if isinstance(expected, bool) or isinstance(value, bool):  # to Python, True equals 1
        return expected is value
    if isinstance(expected, float) and isinstance(value, int | float):
        return _is_close(expected, value, tolerance)
    return value == expected


def _is_close(wanted: float, got: float, tolerance: float) -> bool:
    try:
        got = float(got)
    except OverflowError:  # an integer beyond the range of floats
        return False
    if not (math.isfinite(wanted) and math.isfinite(got)):
        return False
    return abs(wanted - got) <= tolerance * max(1.0, abs(wanted))
