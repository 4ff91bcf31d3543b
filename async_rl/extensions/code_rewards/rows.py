"""Reads the tests of a row when data is loaded, in any of their forms, for a reward that runs programs."""

from __future__ import annotations

import ast
import json
from typing import Any

from async_rl.data.sendable import why_unsendable
from async_rl.extensions.code_rewards.row_tests import parse_tests

_TEST_DEPTH = 2
"""Number of lists and objects around one value of ``test_cases``."""


def read_tests(fields: dict[str, Any]) -> dict[str, Any]:
    """Check the tests in ``fields``, those of a row, and return the fields as they are sent to a generator.

    ``test_cases`` has only ``inputs`` and ``outputs`` then, or ``check`` and ``setup``. ``fn_name`` is there if a
    function is called. Values that can't be sent are JSON text, which ``parse_tests`` reads. Without tests, all stays.

    Raises:
        ValueError: a test is malformed. The message names the field.
    """
    if "test_cases" not in fields and {"test", "entry_point"} <= fields.keys():
        fields = _from_check(fields)
    if "test_cases" not in fields:
        return fields
    function = parse_tests(fields).function
    cases = {
        key: fields["test_cases"][key] for key in ("inputs", "outputs", "check", "setup") if key in fields["test_cases"]
    }
    if function is not None and "check" not in cases:  # values of any size and depth can be sent as JSON text
        cases["inputs"] = [
            "\n".join(map(json.dumps, given)) if why_unsendable(given, _TEST_DEPTH) else given
            for given in cases["inputs"]
        ]
        cases["outputs"] = [
            json.dumps(value) if why_unsendable(value, _TEST_DEPTH) else value for value in cases["outputs"]
        ]
    return {**fields, "test_cases": cases} | ({} if function is None else {"fn_name": function})


def _from_check(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` with tests in HumanEval's form, ``test`` and ``entry_point``, as ``test_cases``.

    If the prompt is Python (a function without its body), it is the setup, with its imports and helpers.
    """
    prompt = fields.get("prompt")
    try:
        is_code = isinstance(prompt, str) and any(isinstance(node, ast.FunctionDef) for node in ast.parse(prompt).body)
    except (SyntaxError, ValueError, RecursionError):
        is_code = False
    rest = {key: value for key, value in fields.items() if key not in ("test", "entry_point")}
    cases = {"check": fields["test"], "fn_name": fields["entry_point"]}
    return {**rest, "test_cases": cases | ({"setup": prompt} if is_code else {})}
