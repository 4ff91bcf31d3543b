"""Compares sets of real numbers: intervals, their unions, and what inequalities say. ``comparison`` calls it."""

from __future__ import annotations

from typing import Any

import sympy

from latex_answers.relations import INEQUALITIES, is_solution, names_in, plain_relation
from latex_answers.same_expressions import without_functions
from latex_answers.values import Group, NamedSet, Relation, SetOperation, Value, is_expression, is_matrix

_SETS = {"R": sympy.S.Reals, "Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals, "": sympy.S.EmptySet}


def is_region(value: Value) -> bool:
    """Whether ``value`` is an inequality, or several with ``and`` or ``or`` between them."""
    if isinstance(value, Group):
        return bool(value.conjunction) and all(is_region(item) for item in value.items)
    value = plain_relation(value)
    return isinstance(value, Relation) and bool(value.operators) and set(value.operators) <= INEQUALITIES


def joined_sets(value: Value) -> list[Value]:
    """Return the sets that a union or an intersection joins."""
    operator, found, waiting = value.operator, [], [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, SetOperation) and one.operator == operator:
            waiting += [one.right, one.left]
        else:
            found.append(one)
    return found


def real_set(value: Value) -> Any:
    """Return ``value`` as a set of sympy, or None if it is no set of real numbers that sympy can build.

    Inequalities are a set if they say between which numbers one name lies, or are several of that kind with ``and`` or
    ``or``. An inequality to solve is none: a question's own inequality must not earn the reward of its solution.
    """
    value = plain_relation(value)
    if isinstance(value, NamedSet):
        return _SETS.get(value.name)
    if isinstance(value, Relation):
        return solution_set(value) if is_solution(value) and set(value.operators) <= INEQUALITIES else None
    if isinstance(value, Group) and is_region(value):
        parts = [real_set(item) for item in value.items]
        if any(part is None for part in parts) or len(names_in(value)) != 1:
            return None
        return (sympy.Union if value.conjunction == "or" else sympy.Intersection)(*parts)
    if isinstance(value, SetOperation):
        left, right = real_set(value.left), real_set(value.right)
        if left is None or right is None:
            return None
        operations = {"\\cup": sympy.Union, "\\cap": sympy.Intersection, "\\setminus": sympy.Complement}
        return operations[value.operator](left, right)
    if isinstance(value, Group):
        if not all(is_expression(item) and not is_matrix(item) and item.is_extended_real for item in value.items):
            return None
        if value.opening in ("\\{", ""):
            return sympy.FiniteSet(*value.items)
        if len(value.items) != 2 or (value.items[0] < value.items[1]) != sympy.true:
            return None
        if (value.items[0].is_infinite and value.opening == "[") or (
            value.items[1].is_infinite and value.closing == "]"
        ):
            return None
        return sympy.Interval(*value.items, left_open=value.opening == "(", right_open=value.closing == ")")
    if is_expression(value) and not is_matrix(value) and value.is_extended_real:
        return sympy.FiniteSet(value)
    return None


def same_sets(one: Any, two: Any) -> bool:
    """Return whether two sets of sympy are the same.

    Raises:
        NotImplementedError, TypeError, ValueError: sympy can't find out.
    """
    return one == two or sympy.SymmetricDifference(one, two).is_empty is True


def solution_set(relation: Relation) -> Any:
    """Return the real numbers for which an inequality in one variable holds. None if it has another form.

    Raises:
        NotImplementedError, TypeError, ValueError, AttributeError: sympy can't find them.
    """
    if not all(is_expression(side) and not is_matrix(side) for side in relation.sides):
        return None
    sides = without_functions(*relation.sides)
    symbols = set().union(*(side.free_symbols for side in sides))
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    real = sympy.Symbol("real", real=True)
    sides = [side.subs(symbol, real) for side in sides]
    build = {"<": sympy.StrictLessThan, "\\le": sympy.LessThan, "\\ne": sympy.Ne}
    found = sympy.S.Reals
    for operator, left, right in zip(relation.operators, sides, sides[1:], strict=False):
        found = found.intersect(build[operator](left, right).as_set())
    return found
