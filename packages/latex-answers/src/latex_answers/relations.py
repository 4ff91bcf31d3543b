"""What relations say, such as ``x = 5`` and ``0 < x \\le 1``: which of their sides are names, and which are answers.

``comparison`` and ``same_sets`` call it.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
from sympy.functions.elementary.trigonometric import TrigonometricFunction

from latex_answers.same_expressions import same_constant, without_functions
from latex_answers.values import Group, Ratio, Relation, Value, is_constant, is_expression, is_matrix

_FLIPPED = {
    ">": "<",
    "\\ge": "\\le",
    "\\gg": "\\ll",
    "\\supset": "\\subset",
    "\\supseteq": "\\subseteq",
    "\\ni": "\\in",
}
INEQUALITIES = frozenset({"<", "\\le", "\\ne"})
"""Operators that ``plain_relation`` leaves in inequalities."""
_NAMED_LIKE_NUMBERS = (sympy.E, sympy.I)
"""Numbers whose letters are also names: ``e = 2`` is an eccentricity, ``i = 3`` an index."""
_DENIALS = frozenset({"not", "never", "isn", "wrong", "incorrect", "false", "except"})


def plain_relation(value: Value) -> Value:
    """Return a relation that only uses ``<`` and not ``>``, and without approximations of what it says exactly."""
    if not isinstance(value, Relation):
        return value
    operators, sides = list(value.operators), list(value.sides)
    while operators and operators[-1] == "\\approx" and (len(operators) > 1 or not is_name(sides[0])):
        operators.pop()
        sides.pop()
    if operators == ["\\approx"]:
        operators = ["="]
    if not operators and value.modulus is None:
        return sides[0]
    if operators and all(operator in _FLIPPED for operator in operators):
        operators, sides = [_FLIPPED[operator] for operator in reversed(operators)], sides[::-1]
    return Relation(tuple(sides), tuple(operators), value.modulus)


def is_name(value: Value) -> bool:
    r"""Whether ``value`` can be the name of a number or set: ``x``, ``f(2)``, ``|AB|``, ``\cos A``, ``A:B``."""
    if isinstance(value, Group):
        return all(is_name(item) for item in value.items)
    if isinstance(value, Ratio):
        return all(is_name(part) for part in value.parts)
    if not is_expression(value) or is_matrix(value):
        return False
    if value in _NAMED_LIKE_NUMBERS:
        return True
    if _denies(value):
        return False
    (value,) = without_functions(value)
    if isinstance(value, sympy.Abs | TrigonometricFunction):
        value = value.args[0]
    factors = sympy.Mul.make_args(value)
    return all(factor.is_Symbol or (factor.is_Pow and (1 / factor).is_Symbol) for factor in factors)


def _denies(value: Any) -> bool:
    """Whether words among the names of ``value`` deny it, as in ``\\text{not } x``."""
    return any(_DENIALS & set(re.findall(r"[a-z]+", str(symbol))) for symbol in value.free_symbols)


def may_be_asked_for(side: Value) -> bool:
    """Whether a question may ask for ``side``, as for ``x^2+xy``: it has no numbers, so it is no equation to solve."""
    if not is_expression(side) or is_matrix(side) or _denies(side):
        return False
    (side,) = without_functions(side)
    factors: list[Any] = [factor for term in sympy.Add.make_args(side) for factor in sympy.Mul.make_args(term)]
    return all(
        one == -1 or one.is_Symbol or (one.is_Pow and one.base.is_Symbol and one.exp.is_integer is not False)
        for one in factors
    )


def names_in(value: Value) -> list[Value]:
    """Return the variables of a relation or of several: ``x`` of ``1 < |x| < 2``. Other values have none here."""
    relations = value.items if isinstance(value, Group) else (value,)
    sides = [side for one in relations if isinstance(one, Relation) for side in one.sides if is_expression(side)]
    return sorted(set().union(*(side.free_symbols for side in sides)), key=str)


def is_assignment(relation: Relation) -> bool:
    return set(relation.operators) == {"="} and is_name(relation.sides[0])


def first_and_last(relation: Relation) -> Relation:
    return Relation((relation.sides[0], relation.sides[-1]), ("=",))


def holds(relation: Relation) -> bool:
    """Whether the numbers in a chain of equations are the same as the last, which may be rounded after a name."""
    if set(relation.operators) != {"="} or not is_constant(relation.sides[-1]):
        return True
    *sides, last = relation.sides[1:] if relation.sides[0] in _NAMED_LIKE_NUMBERS else relation.sides
    numbers = [side for side in sides if is_constant(side)]
    tolerance = abs(last) / 100 if len(numbers) < len(relation.sides) - 1 and not last.is_Integer else 0
    return all(same_constant(number, last) or abs(number - last) < tolerance for number in numbers)


def is_solution(relation: Relation) -> bool:
    """Whether ``relation`` says of a name what number it is, or between which numbers it lies."""
    names = [side for side in relation.sides if not is_constant(side)]
    if (
        len(names) != 1
        or not is_expression(names[0])
        or is_matrix(names[0])
        or names[0].has(sympy.Abs, TrigonometricFunction)
    ):
        return False
    return is_name(names[0]) or is_name(-names[0])
