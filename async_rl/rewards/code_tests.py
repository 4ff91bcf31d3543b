"""A code row's tests: what ``test_cases`` may look like, checked. Called when data is loaded and when it is graded.

``{"inputs": [...], "outputs": [...]}``, or that as JSON text, with ``fn_name`` in it or beside it for tests that call a
function. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test. Of a script: ``given`` is its standard input, ``expected`` the output it must print, both text.

    Of a function: ``given`` is the JSON list of its arguments, ``expected`` the value it must return, plain data.
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
