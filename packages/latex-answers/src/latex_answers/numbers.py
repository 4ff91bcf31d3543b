r"""Reads plain numbers exactly, without sympy: ``1,234``, ``\frac{1}{2}``, ``1.5\times 10^3``."""

from __future__ import annotations

import re
from fractions import Fraction

from latex_answers.typesetting import unwrapped

_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+"
_DECIMAL = re.compile(rf"(?:(?P<whole>{_GROUPED}|[0-9]+)(?:\.(?P<part>[0-9]*))?|\.(?P<only_part>[0-9]+))")
_FRACTION = re.compile(r"(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+) ?/ ?(?P<bottom>[0-9]+)\.?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_SCIENTIFIC = re.compile(
    r"(?P<mantissa>[0-9.]+) ?(?:\\times|\\cdot|\u00d7|\*) ?10 ?\^ ?"
    r"(?:\{ ?(?P<wide>[+\-\u2212]?[0-9]{1,3}) ?\}|(?P<digit>[0-9]))\.?"
)
_SIGN = re.compile(r"(?:\\?\$)?\s*([+\-\u2212]?)\s*(?:\\?\$)?\s*")
_BASED = re.compile(
    r"(?P<open>\()?(?P<digits>[0-9][0-9A-Za-z]*|[A-Fa-f][0-9A-Fa-f]+)(?(open)\))"
    r"_(?:\{\s*(?P<wide>[0-9]+)\s*\}|(?P<narrow>[0-9])|\{?\\text\{(?P<word>[a-z]+)\}\}?)\.?"
)
_BASES = ("", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_MIN_FLOAT_DIGITS = 12


def plain_number(text: str) -> Fraction | None:
    r"""Return the exact value of ``text`` if it is a plain number, else None.

    Plain numbers are integers, decimals, fractions (``1/2``, ``\frac{1}{2}``), mixed numbers (``1 1/2``) and scientific
    notation (``1.2\times 10^3``). They may have a sign, a dollar sign, correct thousands separators and a full stop at
    the end: ``$1,234.50``, ``+.5``, ``-\frac12``, ``10\,000``.

    ``12,34``, ``1e3``, ``50%``, ``1/0`` and numbers with a unit are not plain numbers.
    """
    text = unwrapped(text)
    text = re.sub(r"\s?\{\s?,\s?\}|,\\!", ",", text)
    text = re.sub(r"\\[,;: ]|~", " ", text)
    text = _LATEX_FRACTION.sub(lambda found: f" {found[1] or found[2]}/{found[3] or found[4]} ", text)
    text = re.sub(r"\s+", " ", text).strip()
    lead = _SIGN.match(text)
    assert lead is not None  # every part of it is optional
    rest = text[lead.end() :]
    scientific = _SCIENTIFIC.fullmatch(rest)
    if scientific is not None:
        value = _scientific(scientific)
    else:
        value = _decimal(rest) if "/" not in rest else _fraction(rest)
    return value if value is None or lead[1] in ("", "+") else -value


def _decimal(text: str) -> Fraction | None:
    found = _DECIMAL.fullmatch(text)
    if found is None:
        return None
    whole = re.sub("[, ]", "", found["whole"] or "0")
    part = found["part"] or found["only_part"] or "0"
    return Fraction(f"{whole}.{part}")


def _scientific(found: re.Match[str]) -> Fraction | None:
    mantissa = _decimal(found["mantissa"])
    exponent = int((found["wide"] or found["digit"]).replace("\u2212", "-"))
    return None if mantissa is None else mantissa * Fraction(10) ** exponent


def _fraction(text: str) -> Fraction | None:
    found = _FRACTION.fullmatch(text)
    if found is None or int(found["bottom"]) == 0:
        return None
    if found["whole"] and int(found["top"]) >= int(found["bottom"]):  # 3 5/4 is a product, if it is anything
        return None
    return int(found["whole"] or 0) + Fraction(int(found["top"]), int(found["bottom"]))


def is_float_of(text: str, number: Fraction, exact: Fraction) -> bool:
    """Return whether the decimal ``text`` is what remains of ``exact`` after rounding or cutting its digits.

    ``number`` is the value of ``text``. Return False for a decimal with few places, because a person may have written
    it as an exact answer.
    """
    found = re.search(r"([0-9]*)\.([0-9]+)", text)
    return (
        found is not None
        and len((found[1] + found[2]).lstrip("0")) >= _MIN_FLOAT_DIGITS
        and abs(number - exact) < Fraction(1, 10 ** len(found[2]))
    )


def based_integer(text: str) -> int | None:
    """Return the value of an integer with its base as a subscript: 54 for ``204_5``. None for any other text."""
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    base = int(found["wide"] or found["narrow"] or (_BASES.index(found["word"]) if found["word"] in _BASES else 0))
    if base != 16 and found["digits"].isalpha():  # AB_{12} is a name
        return None
    try:
        return int(found["digits"], base) if base >= 2 else None
    except ValueError:  # a digit that the base does not have, or a base over 36
        return None
