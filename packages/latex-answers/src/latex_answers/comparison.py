r"""Decides whether two answers that were read whole are the same. ``equality`` calls it.

Structures are compared part by part: brackets, order (except in sets and lists without brackets), units, operators of
relations and both of their sides. Expressions are compared by ``same_expressions``. What is lenient is on purpose, and
listed in the README: a name before an answer (``x=5`` for 5), a unit that one side lacks, percent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from sympy.polys.polyerrors import BasePolynomialError

from latex_answers.finding import Finding, UnreadableError
from latex_answers.reading import Reading, read
from latex_answers.relations import (
    first_and_last,
    holds,
    is_assignment,
    is_name,
    is_solution,
    may_be_asked_for,
    names_in,
    plain_relation,
)
from latex_answers.same_expressions import constant_ratio, same_constant, same_expression
from latex_answers.same_sets import is_region, joined_sets, real_set, same_sets, solution_set
from latex_answers.values import (
    Group,
    NamedSet,
    Quantity,
    Ratio,
    Relation,
    SetOperation,
    Value,
    is_constant,
    is_expression,
    is_matrix,
)  # fmt: skip

SYMPY_ERRORS = (
    ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError, BasePolynomialError,
)  # fmt: skip
"""What sympy raises if it can't compute a text that was read, such as a condition that it can't solve."""
_NAMING = frozenset({"=", "\\in", "\\equiv"})


def same_answers(answer: str, gold: str) -> Finding:
    """Return whether both texts can be read to their last token and say the same.

    Args:
        answer: the answer to judge, in the notation of ``notation.in_latex`` and ``arguments.spelled_out``.
        gold: the right answer, likewise.
    """
    try:
        return "equal" if same_readings(read(gold), read(answer)) else "different"
    except UnreadableError:
        return "unreadable"
    except SYMPY_ERRORS:
        return "not_computed"


def same_readings(gold: Reading, answer: Reading) -> bool:
    digits = [reading.num_digits for reading in (gold, answer) if reading.num_digits is not None]
    # Two rounded numbers are two numbers.
    tolerance = sympy.Rational(1, 10 ** (digits[0] - 1)) if len(digits) == 1 else None
    return Comparison(tolerance).same(gold.value, answer.value)


class Comparison:
    """The rules, and the relative tolerance of numbers (None: none)."""

    def __init__(self, tolerance: Any) -> None:
        self._tolerance = tolerance

    def same(self, gold: Value, answer: Value) -> bool:
        gold, answer = plain_relation(gold), plain_relation(answer)
        gold, answer = _as_tuple(gold, answer), _as_tuple(answer, gold)
        if is_region(gold) != is_region(answer) or (is_region(gold) and type(gold) is not type(answer)):
            return _same_region(gold, answer)
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self._same_relations(gold, answer)
        if isinstance(gold, SetOperation | NamedSet) or isinstance(answer, SetOperation | NamedSet):
            return self._same_sets(gold, answer)
        if isinstance(gold, Group) or isinstance(answer, Group):
            return isinstance(gold, Group) and isinstance(answer, Group) and self._same_groups(gold, answer)
        if isinstance(gold, Ratio) or isinstance(answer, Ratio):
            return self._same_ratios(gold, answer)
        if isinstance(gold, Quantity) or isinstance(answer, Quantity):
            return self._same_quantities(gold, answer)
        return same_expression(gold, answer, self._tolerance)

    # Numbers with units.

    def _same_quantities(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, Quantity) and isinstance(answer, Quantity):
            if gold.unit == answer.unit:
                return same_expression(gold.number, answer.number, self._tolerance)
            products = gold.product is not None and answer.product is not None
            return products and same_expression(gold.product, answer.product)
        one, other = (gold, answer) if isinstance(gold, Quantity) else (answer, gold)
        if is_matrix(other):
            return False
        if not is_constant(other):
            return one.product is not None and same_expression(one.product, other)
        is_share = one.unit == "%" and one is answer and abs(other) < 1 and not other.is_Integer
        if not is_share and same_expression(one.number, other, self._tolerance):
            return True
        if one.unit == "degree" and other.has(sympy.pi):
            return same_expression(one.number * sympy.pi / 180, other)
        return one.unit == "%" and same_expression(one.number / 100, other, self._tolerance)

    def _same_ratios(self, gold: Value, answer: Value) -> bool:
        if not isinstance(gold, Ratio):
            return False
        if not isinstance(answer, Ratio):
            if len(gold.parts) != 2 or not is_expression(answer) or gold.parts[1] == 0 or _is_clock(gold):
                return False
            return same_expression(gold.parts[0] / gold.parts[1], answer)
        if len(gold.parts) != len(answer.parts):
            return False
        if all(same_expression(one, two) for one, two in zip(gold.parts, answer.parts, strict=True)):
            return True
        if _is_clock(gold) or not all(is_constant(part) and part != 0 for part in (*gold.parts, *answer.parts)):
            return False
        factor = gold.parts[0] / answer.parts[0]
        return all(same_constant(one, two * factor) for one, two in zip(gold.parts, answer.parts, strict=True))

    # Lists, tuples, sets.

    def _same_groups(self, gold: Group, answer: Group) -> bool:
        brackets = {(gold.opening, gold.closing), (answer.opening, answer.closing)}
        if not (len(brackets) == 1 or brackets <= {("(", ")"), ("\\{", "\\}"), ("", "")}):
            return False
        in_order = any(mark in ("(", "[", ")", "]") for pair in brackets for mark in pair) or _has_dots(gold)
        if in_order or _has_names_to_order(gold, answer):
            if len(gold.items) != len(answer.items):
                return False
            return all(self.same(one, two) for one, two in zip(gold.items, answer.items, strict=True))
        if _are_conditions(gold) and {gold.conjunction, answer.conjunction} == {"and", "or"}:
            return False
        distinct = self._distinct(gold)
        if brackets == {("", "")} and len(distinct) < len(gold.items):  # 3, 3, 5 may be the sides of a triangle
            return same_in_any_order(gold.items, answer.items, self.same)
        return same_in_any_order(distinct, self._distinct(answer), self.same)

    def _distinct(self, group: Group) -> list[Value]:
        """Return the items of a set, without those that are written twice."""
        found: list[Value] = []
        for item in group.items:
            if not any(self.same(other, item) for other in found):
                found.append(item)
        return found

    def _same_sets(self, gold: Value, answer: Value) -> bool:
        if self._same_in_structure(gold, answer):
            return True
        one, two = real_set(gold), real_set(answer)
        return one is not None and two is not None and same_sets(one, two)

    def _same_in_structure(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, NamedSet) or isinstance(answer, NamedSet):
            return gold == answer
        if not (isinstance(gold, SetOperation) and isinstance(answer, SetOperation)):
            return False
        if gold.operator != answer.operator:
            return False
        if gold.operator == "\\setminus":
            return self.same(gold.left, answer.left) and self.same(gold.right, answer.right)
        return same_in_any_order(joined_sets(gold), joined_sets(answer), self.same)

    # Relations.

    def _same_relations(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._same_relation(gold, answer)
        if isinstance(answer, Relation):
            asked = all(is_name(side) or is_constant(side) or may_be_asked_for(side) for side in answer.sides[:-1])
            if not (asked and self._is_named(answer) and holds(answer)) or _is_interval_for_list(gold, answer):
                return False
            return self.same(gold, answer.sides[-1])
        if not self._is_named(gold) or gold.modulus is not None:
            return False
        named = any(is_name(side) for side in gold.sides[:-1])
        return named and self.same(gold.sides[-1], answer)

    def _is_named(self, relation: Relation) -> bool:
        return set(relation.operators) <= _NAMING

    def _same_relation(self, gold: Relation, answer: Relation) -> bool:
        if gold.modulus is not None or answer.modulus is not None:
            return self._same_congruence(gold, answer)
        if is_assignment(gold) and is_assignment(answer):
            gold, answer = first_and_last(gold), first_and_last(answer)
        if is_region(gold) and is_solution(answer) and not is_solution(gold):
            return _same_region(gold, answer)
        if gold.operators != answer.operators:
            return False
        if all(self.same(one, two) for one, two in zip(gold.sides, answer.sides, strict=True)):
            return True
        symmetric = set(gold.operators) <= {"=", "\\ne", "\\approx", "\\sim", "\\cong", "\\parallel", "\\perp"}
        if symmetric and all(self.same(one, two) for one, two in zip(gold.sides, answer.sides[::-1], strict=True)):
            return True
        return len(gold.operators) == 1 and self._same_difference(gold, answer)

    def _same_difference(self, gold: Relation, answer: Relation) -> bool:
        """Whether two equations or inequalities say the same of the difference of their sides.

        A solution (``x=5``) is the same as another solution only. Otherwise the equation of the question would be.
        """
        if is_solution(gold) and not is_solution(answer):
            return False
        operator = gold.operators[0]
        sides = (*gold.sides, *answer.sides)
        if operator not in ("=", "<", "\\le", "\\ne"):
            return False
        if not all(is_expression(side) and not is_matrix(side) and not side.has(sympy.oo) for side in sides):
            return False
        if all(is_constant(side) for side in sides):
            return False
        ratio = constant_ratio(gold.sides[0] - gold.sides[1], answer.sides[0] - answer.sides[1])
        return ratio is not None and (operator in ("=", "\\ne") or bool(ratio.is_positive))

    def _same_congruence(self, gold: Relation, answer: Relation) -> bool:
        one, two = gold.modulus, answer.modulus
        if one is None or two is None or not same_expression(one, two):
            return False
        sides, other_sides = list(gold.sides), list(answer.sides)
        if len(sides) > 2 or len(other_sides) > 2 or not {*gold.operators, *answer.operators} <= {"=", "\\equiv"}:
            return False
        if len(sides) == len(other_sides) == 2 and not self.same(sides[0], other_sides[0]):
            return False
        first, second = sides[-1], other_sides[-1]
        if is_expression(first) and is_expression(second) and one.is_Integer and one != 0:
            gap = first - second
            if gap.is_Integer:
                return bool(gap % one == 0)
        return self.same(first, second)


def _same_region(gold: Value, answer: Value) -> bool:
    """Whether inequalities (``x>2``) say the same as a set or as inequalities with another word between them."""
    names = names_in(gold)
    if isinstance(answer, Relation) and answer.operators == ("\\in",) and answer.sides[0] in names:
        answer = answer.sides[1]
    if is_expression(gold) or is_expression(answer) or (names and is_region(answer) and names != names_in(answer)):
        return False
    one = solution_set(gold) if isinstance(gold, Relation) and is_region(gold) else real_set(gold)
    two = real_set(answer)
    return one is not None and two is not None and same_sets(one, two)


def same_in_any_order(gold: Sequence[Value], answer: Sequence[Value], same: Callable[[Value, Value], bool]) -> bool:
    left = list(answer)
    if len(left) != len(gold):
        return False
    for one in gold:
        index = next((index for index, two in enumerate(left) if same(one, two)), None)
        if index is None:
            return False
        left.pop(index)
    return True


def _as_tuple(value: Value, other: Value) -> Value:
    """Return a matrix of one row or column as a tuple, if ``other`` is one."""
    is_vector = is_matrix(value) and 1 in value.shape and isinstance(other, Group) and other.opening == "("
    return Group("(", ")", tuple(value)) if is_vector else value


def _is_interval_for_list(gold: Value, answer: Relation) -> bool:
    """Whether ``answer`` says ``x \\in (2,3)`` but ``gold`` is a list or a set of numbers, which a tuple may equal."""
    inside = answer.sides[-1]
    is_interval = answer.operators[-1:] == ("\\in",) and isinstance(inside, Group) and inside.opening in ("(", "[")
    return is_interval and isinstance(gold, Group) and gold.opening not in ("(", "[")


def _has_dots(group: Group) -> bool:
    return sympy.Symbol("\\dots") in group.items


def _are_conditions(group: Group) -> bool:
    """Whether it matters if all items hold or only one. ``x=1 and x=2`` is said of two solutions like ``or``."""
    return not all(
        is_constant(item) or isinstance(item, Group) or (isinstance(item, Relation) and item.operators == ("=",))
        for item in group.items
    )


def _has_names_to_order(gold: Group, answer: Group) -> bool:
    """Whether ``gold`` names its items (``x=1, y=2``) and ``answer`` gives only values, whose order then counts."""
    names = {str(item.sides[0]) for item in gold.items if isinstance(item, Relation)}
    return len(names) > 1 and not any(isinstance(item, Relation) for item in answer.items)


def _is_clock(ratio: Ratio) -> bool:
    return (
        len(ratio.parts) == 2
        and all(part.is_Integer for part in ratio.parts)
        and 0 <= ratio.parts[0] <= 24
        and 10 <= ratio.parts[1] < 60
    )
