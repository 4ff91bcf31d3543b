r"""What differs although math_verify would call it equal. Pure; called by ``equality`` before it asks.

Each of these was found by trying: it drops the base of ``12_5``, takes any text behind a number for a unit without
looking at it, and compares the right side of an equation with a number whatever stands on the left.
"""

from __future__ import annotations

import re

_BASED = re.compile(r"(?P<digits>[0-9A-Za-z]+)_(?:\{\s*(?P<wide>[0-9]+)\s*\}|(?P<narrow>[0-9]))\.?")
_UNIT = re.compile(
    r"(?P<number>.*?[0-9}\])])\s*\\(?:text|textnormal|textrm|mbox|mathrm|operatorname)\s*\{(?P<unit>[^{}]*)\}"
    r"\s*(?:\^\s*\{?\s*(?P<power>[0-9])\s*\}?)?\s*",
    re.DOTALL,
)
_EQUALS = re.compile(r"(?<![<>!=:])=(?!=)")
_OTHER_RELATION = re.compile(r"[<>=]|\\(?:leq?|geq?|lt|gt|neq?|in|approx|equiv|sim)(?![A-Za-z])")
_BRACKETS = re.compile(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]")
_SUM = re.compile(r"[^\s(\[{,^_=]\s*[+\-]")


def surely_different(gold: str, prediction: str) -> bool:
    """Whether two answers in ``typeset_form`` differ in a base, in their units, or in being an equation at all."""
    gold_value, value = based_integer(gold), based_integer(prediction)
    if gold_value is not None and value is not None:
        return gold_value != value
    gold_unit, unit = unit_of(gold), unit_of(prediction)
    if gold_unit and unit and gold_unit != unit:
        return True
    return _is_equation_of_a_sum(gold) and _OTHER_RELATION.search(prediction) is None


def based_integer(text: str) -> int | None:
    """The value of an integer with its base as a subscript (``204_5`` is 54); None if ``text`` is anything else."""
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    base = int(found["wide"] or found["narrow"])
    try:
        return int(found["digits"], base) if base >= 2 else None
    except ValueError:  # a digit that the base does not have, or a base over 36
        return None


def unit_of(text: str) -> str:
    r"""The unit that ``\text{...}`` puts behind a number, with its power, in lower case singular; empty for none."""
    found = _UNIT.fullmatch(text)
    if found is None:
        return ""
    unit = re.sub(r"[^\w%/]", "", found["unit"]).casefold()
    unit = unit.removesuffix("s") if len(unit) > 2 else unit
    return f"{unit}^{found['power']}" if found["power"] and unit else unit


def _is_equation_of_a_sum(gold: str) -> bool:
    """``x+y=3`` says something else than 3; ``x=3`` or ``f(x)=3`` only gives it a name."""
    sides = _EQUALS.split(gold)
    if len(sides) != 2:
        return False
    left, before = sides[0], ""
    while left != before:  # what stands in brackets is no term: f(x-1)
        before, left = left, _BRACKETS.sub("", left)
    return _SUM.search(left) is not None and re.search(r"[A-Za-z]", left) is not None
