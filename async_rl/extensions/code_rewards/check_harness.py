"""Runs inside the sandbox: the source of this module is text for ``check_function``, which sends it there.

There are two kinds of processes. One has the answer's program and ``_async_rl_call_all``; it only computes return
values. The other has the row's tests and ``_async_rl_check``, and never runs code of the answer: ``candidate`` there
looks up return values. Values travel as JSON with a tag for each type that JSON lacks, so nothing but data of plain
types gets from one to the other. All names have a prefix, because the program's names share the module.
"""

import ast as _async_rl_ast
import builtins as _async_rl_builtins
import contextlib as _async_rl_contextlib
import json as _async_rl_json
from typing import Any as _async_rl_Any


def _async_rl_pack(value: _async_rl_Any) -> _async_rl_Any:
    """Return ``value`` as plain JSON data. Raises TypeError for other than builtin plain types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_async_rl_pack(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_async_rl_pack(key), _async_rl_pack(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [_async_rl_pack(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return _async_rl_pack(value.tolist())
    raise TypeError(f"expected plain data, got {type(value).__name__}")


def _async_rl_unpack(data: _async_rl_Any) -> _async_rl_Any:
    """Return the value that ``_async_rl_pack`` made ``data`` from. Raises for anything else."""
    if isinstance(data, list):
        return [_async_rl_unpack(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    if kind == "dict":
        return {_async_rl_unpack(key): _async_rl_unpack(item) for key, item in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(_async_rl_unpack, inner))


def _async_rl_call_all(name: str, calls: list[_async_rl_Any]) -> list[_async_rl_Any]:
    """Call the program's function ``name`` with each of ``calls``. Return for each ["returned", value] or ["raised"].

    A hostile program may return anything here, which is as if its function returned it.
    """
    function = globals().get(name) or getattr(globals()["Solution"](), name)
    results: list[_async_rl_Any] = []
    for call in calls:
        arguments, named = _async_rl_unpack(call)
        try:
            results.append(["returned", _async_rl_pack(function(*arguments, **named))])
        except Exception:
            results.append(["raised"])
    return results


class _AsyncRlUnknownCall(BaseException):
    """The tests make a call whose result is not known yet. No ``except Exception`` of the tests may catch it."""


class _AsyncRlBrokenTestsError(BaseException):
    """The tests call the candidate with something else than plain data."""


class _AsyncRlProgramError(Exception):
    """The program raised an exception."""


def _async_rl_tests(
    setup: str, tests: str, function: str, candidate: _async_rl_Any, *, keeps_asserts: bool
) -> _async_rl_Any:
    """Return the function ``check`` that the text ``tests`` defines, with the names of ``setup`` in reach.

    The tests may also call ``candidate`` by the name ``function``, unless they define that themselves.
    """
    names: dict[str, _async_rl_Any] = {"__name__": "tests"}
    exec(compile(setup, "setup", "exec", dont_inherit=True), names)
    without_body = names.get(function)
    tree = _async_rl_ast.parse(tests)
    if not keeps_asserts:
        tree = _async_rl_ast.fix_missing_locations(_AsyncRlWithoutAsserts().visit(tree))
    exec(compile(tree, "tests", "exec", dont_inherit=True), names)
    if names.get(function) is without_body:
        names[function] = candidate
    return names["check"]


class _AsyncRlWithoutAsserts(_async_rl_ast.NodeTransformer):
    """Evaluates what is asserted, and goes on whatever comes of it."""

    def visit_Assert(self, node: _async_rl_ast.Assert) -> _async_rl_ast.AST:
        nothing = _async_rl_ast.ExceptHandler(
            type=_async_rl_ast.Name("Exception", _async_rl_ast.Load()), name=None, body=[_async_rl_ast.Pass()]
        )
        body: list[_async_rl_ast.stmt] = [_async_rl_ast.Expr(node.test)]
        return _async_rl_ast.copy_location(_async_rl_ast.Try(body, [nothing], [], []), node)


def _async_rl_calls(setup: str, tests: str, function: str) -> list[_async_rl_Any]:
    """Return the calls that the tests will probably make, as far as they do not depend on results."""
    calls: list[_async_rl_Any] = []

    def candidate(*arguments: _async_rl_Any, **named: _async_rl_Any) -> None:
        calls.append(_async_rl_pack(((*arguments,), named)))
        if len(calls) >= 1000:
            raise _AsyncRlUnknownCall

    # Calls after an exception are asked for later, one at a time.
    with _async_rl_contextlib.suppress(Exception, _AsyncRlUnknownCall):
        _async_rl_tests(setup, tests, function, candidate, keeps_asserts=False)(candidate)
    return calls


def _async_rl_check(setup: str, tests: str, function: str, known: list[_async_rl_Any]) -> list[_async_rl_Any]:
    """Run the tests. ``known`` has pairs (call, result), in the order of the calls.

    Returns:
        ["passed"], ["wrong", reason], ["unknown", number of used pairs, call], or ["broken", reason] if the tests can't
        be run at all.
    """
    asked: list[_async_rl_Any] = []
    num_used = 0

    def candidate(*arguments: _async_rl_Any, **named: _async_rl_Any) -> _async_rl_Any:
        nonlocal num_used
        try:
            call = _async_rl_pack(((*arguments,), named))
        except TypeError as error:
            raise _AsyncRlBrokenTestsError(str(error)) from None
        if num_used >= len(known) or _async_rl_json.dumps(known[num_used][0]) != _async_rl_json.dumps(call):
            asked.append(call)
            raise _AsyncRlUnknownCall
        result = known[num_used][1]
        num_used += 1
        if result[0] == "raised":
            raise _AsyncRlProgramError("the program raised an exception")
        return _async_rl_unpack(result[1])

    try:
        check = _async_rl_tests(setup, tests, function, candidate, keeps_asserts=True)
    except _async_rl_builtins.BaseException as error:
        return ["broken", f"{type(error).__name__}: {error}"]
    try:
        check(candidate)
    except _AsyncRlUnknownCall:
        return ["unknown", num_used, asked[-1]]
    except _AsyncRlBrokenTestsError as error:
        return ["broken", f"an argument of the candidate: {error}"]
    except _async_rl_builtins.BaseException as error:
        return ["wrong", f"{type(error).__name__}: {error}"]
    return ["passed"] if num_used else ["broken", "the tests never call the candidate"]
