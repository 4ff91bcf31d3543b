"""Evaluates arithmetic that a model wrote: numbers, + - * / and brackets. Results are exact. No code is executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> tuple[Fraction, list[Fraction]]:
    """Return the exact value of ``expression``, and the numbers in ``expression`` in order and without their signs.

    Raises:
        ValueError: ``expression`` has more than numbers, + - * / and brackets, is too long, or divides by zero.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"expected an expression of at most {MAX_CHARACTERS} characters, got {len(expression)}; shorten it"
        )
    numbers: list[Fraction] = []
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, numbers), numbers
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise ValueError(
            f"expected arithmetic that can be computed, got {expression!r}: {type(error).__name__}: {error}"
        ) from error


def _value(node: ast.expr, numbers: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        numbers.append(Fraction(str(node.value)))
        return numbers[-1]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    raise ValueError(f"expected only numbers, + - * / and brackets, got {ast.unparse(node)}")
