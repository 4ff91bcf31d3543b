r"""Decides whether two expressions of sympy have the same value. ``comparison`` calls it.

Numbers are compared exactly where sympy knows their exact value, else by 300 digits, which is a relative tolerance and
no absolute one: ``2^{-60}`` and ``2^{-61}`` differ. Expressions with variables are the same if they have the same value
at several points, with variables of either sign. What may have several pieces (``|x-20|``) is also compared far away,
at 0, at halves and at integers. Points at which neither has a value decide nothing, nor do those at which they differ
and neither is real. Undefined functions (``f(x)``, a sum, a limit) count as variables, one for each function with its
arguments.
"""

from __future__ import annotations

import random
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from latex_answers.values import DEGREE, Expression, is_matrix

_DIGITS = 50
_SPARE_DIGITS = 10
_CONFIRMING_DIGITS = 300
"""Digits that must agree, if the first ``_DIGITS`` do."""
_MAX_DIGITS = 3000
_TINY = sympy.Float(10) ** -30
_NUM_POINTS = 6
_FAR = (30, 10**3, 10**5, 10**8)
"""Sizes of variables far away. Those above 1,000 are left out if a variable stands in an exponent or a factorial."""
_PIECES = (
    sympy.floor, sympy.ceiling, sympy.Mod, sympy.Min, sympy.Max, sympy.Abs, sympy.sign, sympy.log, sympy.asin,
    sympy.acos, sympy.atan, sympy.arg,
)  # fmt: skip
"""Functions that may be another expression beyond a point, so that small points can't tell what they are."""
_ROUNDING = sympy.Rational(1, 10**20)
_NO_VALUES = (sympy.nan, sympy.zoo)


def same_expression(gold: Expression, answer: Expression, tolerance: Any = None) -> bool:
    """Return whether two expressions have the same value.

    ``tolerance`` is the relative difference that two constants may have, if one of them is a rounded number.
    """
    if is_matrix(gold) or is_matrix(answer):
        if not (is_matrix(gold) and is_matrix(answer)) or gold.shape != answer.shape:
            return False
        return all(same_expression(one, two, tolerance) for one, two in zip(gold, answer, strict=True))
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return bool(gold == answer)
    if gold.has(*_NO_VALUES) or answer.has(*_NO_VALUES):
        return False
    if gold.has(DEGREE) != answer.has(DEGREE):
        gold, answer = gold.subs(DEGREE, 1), answer.subs(DEGREE, 1)
    if gold == answer:
        return True
    gold, answer = without_functions(gold, answer)
    symbols = variables_of(gold, answer)
    if gold.has(sympy.oo, -sympy.oo) or answer.has(sympy.oo, -sympy.oo):
        return bool(gold == answer)
    return same_constant(gold, answer, tolerance) if not symbols else _same_at_points(gold, answer, symbols)


def variables_of(*expressions: Any) -> list[Any]:
    return sorted(set().union(*(one.free_symbols for one in expressions)), key=str)


def without_functions(*expressions: Expression) -> list[Any]:
    """Return the expressions with a variable for each undefined function and its arguments."""
    names: dict[Expression, Expression] = {}

    def variable(one: Expression) -> Expression:
        arguments = [sympy.expand(argument) for argument in one.args]
        return names.setdefault(one.func(*arguments), sympy.Symbol(f"function {len(names)}"))

    results = []
    for one in expressions:
        while found := one.atoms(AppliedUndef):
            innermost = [function for function in found if not any(part.atoms(AppliedUndef) for part in function.args)]
            one = one.xreplace({function: variable(function) for function in innermost})
        results.append(one)
    return results


def same_constant(one: Expression, two: Expression, tolerance: Any = None) -> bool:
    """Return whether two constants have the same value, exactly or within the relative ``tolerance``.

    Rounding changes no integer and no short decimal, so these are compared exactly in any case.
    """
    if one.is_Rational and two.is_Rational:
        is_exact = one.is_Integer or two.is_Integer or (_terminates(one) and _terminates(two))
        if tolerance is None or is_exact:
            return bool(one == two)
    digits = _DIGITS
    while True:
        first, second = one.evalf(digits), two.evalf(digits)
        if not (_is_number(first) and _is_number(second)):
            return False
        size, gap = max(abs(first), abs(second)), abs(first - second)
        if tolerance is not None:
            return bool(gap <= tolerance * size)
        if gap > size * sympy.Float(10, digits) ** (_SPARE_DIGITS - digits):
            # Two sums that cancel have no digits that could be compared.
            is_tiny = size < _TINY and 0 in (one, two)
            return bool(is_tiny and sympy.simplify(one - two) == 0)
        # Of large numbers, the digits behind the point are compared too: e^400 is not e^400 + 1.
        needed = _CONFIRMING_DIGITS + (len(str(sympy.floor(size))) if size > 1 else 0) + _digits_below(one, two)
        needed = min(needed, _MAX_DIGITS)
        if digits >= needed:
            return True
        digits = needed


def _digits_below(*constants: Expression) -> int:
    """Return how many digits behind the point the smallest term of a sum needs: 400 for ``\\sqrt{2}+10^{-400}``."""
    terms = [term for one in constants for part in one.atoms(sympy.Add) for term in part.args]
    sizes = [abs(1 / sympy.Integer(term.q) if term.is_Rational else term.evalf(5)) for term in terms]
    return int(-sympy.log(min((size for size in sizes if 0 < size < 1), default=1), 10).evalf(5))


def _terminates(number: Any) -> bool:
    """Whether a rational number is a decimal with an end: its denominator has no prime factors but 2 and 5."""
    bottom = int(number.q)
    return pow(10, bottom.bit_length(), bottom) == 0


def _is_number(value: Any) -> bool:
    real, imaginary = value.as_real_imag()
    return real.is_Number and imaginary.is_Number and bool(real.is_finite and imaginary.is_finite)


def points(symbols: list[Any]) -> list[dict[Any, Any]]:
    """Return the points at which expressions are compared: first with positive variables only, then of any sign."""
    rng = random.Random(len(symbols))
    results = []
    for number in range(_NUM_POINTS):
        signs = (1,) if number < 2 else (1, -1)
        scale = 7 if number % 2 else 89
        results.append({
            symbol: sympy.Rational(rng.choice(signs) * rng.randrange(101, 997), scale * rng.choice((11, 13, 17, 19)))
            for symbol in symbols
        })  # fmt: skip
    if symbols:
        results[3] = {symbol: -abs(value) for symbol, value in results[3].items()}
    return results


def value_at(expression: Expression, point: dict[Any, Any]) -> Expression | None:
    """Return the constant that ``expression`` is at ``point``, or None if it has no value there."""
    value = expression.subs(point)
    if value.has(*_NO_VALUES, sympy.oo, -sympy.oo):
        return None
    return value


def _same_at_points(gold: Expression, answer: Expression, symbols: list[Any]) -> bool:
    num_compared = 0
    is_real = not gold.has(sympy.I) and not answer.has(sympy.I)
    near = [(point, None) for point in points(symbols)]
    for point, tolerance in near + [(point, _ROUNDING) for point in _far_points(gold, answer, symbols)]:
        one, two = value_at(gold, point), value_at(answer, point)
        if one is None or two is None:
            if tolerance is None and one is not two:
                return False
            continue
        if same_constant(one, two, tolerance):
            num_compared += 1
        elif not (is_real and one.is_extended_real is False and two.is_extended_real is False):
            return False
    return num_compared >= _NUM_POINTS // 2


def _far_points(gold: Expression, answer: Expression, symbols: list[Any]) -> list[dict[Any, Any]]:
    """Return large points of either sign, integers, and 0, if an expression may have pieces. Else none."""
    powers: list[Any] = [*gold.atoms(sympy.Pow), *answer.atoms(sympy.Pow)]
    has_roots = any(power.exp.is_Rational and not power.exp.is_Integer and power.base.free_symbols for power in powers)
    if not (has_roots or gold.has(*_PIECES) or answer.has(*_PIECES)):
        return []
    grows = any(one.has(sympy.exp, sympy.factorial, sympy.binomial) for one in (gold, answer))
    rng = random.Random(len(symbols))
    results = [{symbol: sympy.Rational(rng.randrange(-9, 10, 2) * top, 2) for symbol in symbols} for top in (0, 1, 2)]
    for size in _FAR[: 2 if grows or any(power.exp.free_symbols for power in powers) else None]:
        point = {symbol: sympy.Rational(size * rng.randrange(101, 997), 101) for symbol in symbols}
        mixed = {symbol: value * rng.choice((1, -1)) for symbol, value in point.items()}
        results += [{key: sign * one[key] for key in one} for one in (point, mixed)[: len(symbols)] for sign in (1, -1)]
    return results


def constant_ratio(one: Expression, two: Expression) -> Expression | None:
    """Return the constant that ``one`` is of ``two`` at every point. None if there is no such constant, or it is 0."""
    one, two = without_functions(one, two)
    symbols = variables_of(one, two)
    ratios = []
    for point in points(symbols):
        first, second = value_at(one, point), value_at(two, point)
        if first is None or second is None:
            continue
        if same_constant(second, sympy.Integer(0)) or same_constant(first, sympy.Integer(0)):
            return None
        ratios.append(first / second)
    if len(ratios) < _NUM_POINTS // 2 or not all(same_constant(ratio, ratios[0]) for ratio in ratios[1:]):
        return None
    return ratios[0]
