"""Units after a number: which words are units, and which units are the same. ``reading`` calls it."""

from __future__ import annotations

import re

SHORT_UNITS = frozenset({
    "cm", "mm", "km", "nm", "ft", "yd", "mi", "kg", "mg", "lb", "lbs", "oz", "ml", "mL", "hr", "hrs", "min", "sec",
    "ms", "mph", "kph", "rpm", "Hz", "kHz", "Pa", "kPa", "kJ", "kW", "mol", "cc", "rad", "deg",
})  # fmt: skip
"""Units of two and three letters. Without upright type, other words need three letters and a space to be a unit."""

NO_UNITS = frozenset({
    "is", "are", "was", "be", "not", "no", "nor", "isn", "never", "wrong", "incorrect", "false", "true", "maybe",
    "perhaps", "possibly", "probably", "either", "but", "except", "than", "less", "more", "fewer", "greater", "least",
    "most", "at", "about", "approximately", "around", "so", "if", "for", "where", "when", "then", "any", "all", "each",
    "plus", "minus", "times", "over", "divided", "multiplied", "mod", "modulo", "remainder", "base", "power", "root",
    "squared", "cubed", "factorial", "negative", "positive", "infinity", "point", "percent", "percents", "to",
    "through", "between", "from", "into", "choose", "equals", "equal", "undefined", "none", "double", "twice", "triple",
    "real", "imaginary", "answer", "answers", "solution", "solutions", "or", "and", "xor", "repeating", "recurring",
    "increased", "decreased", "raised",
})  # fmt: skip
"""Words that make another number or a statement of the number before them. They are not parts of units."""

_NUMBER_WORD = re.compile(
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|[a-z]+illion|lakh|crore|gross|dozen|score|n)"
    r"(?:s|ths?)?"
    r"|(?:half|halve|third|quarter|fifth|eighth|ninth|twelfth|(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet)ieth)s?"
)
"""Numbers and fractions in words. They make another number too: ``5 million``, ``5 twelfths``."""

_SAME = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "kilometer": "km",
    "kilometre": "km", "meter": "m", "metre": "m", "inche": "inch", "in": "inch", "feet": "ft", "foot": "ft",
    "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb", "ounce": "oz",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "liter": "l", "litre": "l", "milliliter": "ml",
    "deg": "degree", "buck": "dollar", "usd": "dollar", "radian": "rad", "newton": "n", "joule": "j", "watt": "w",
}  # fmt: skip


def unit_name(words: str, power: str = "") -> str:
    r"""Return the unit that ``words`` and a raised ``power`` say, so that the same units have the same name.

    ``square inches``, ``in^2`` and ``Inches`` with the power 2 are all ``inch^2``.
    """
    words = re.sub(r"(?<=[a-z])\.", "", words.casefold()).strip()
    found = re.match(r"(?:sq|square|cu|cubic)(?=\s)\s+(.+)", words)
    if found is not None and not power:
        power, words = "3" if words.startswith("cu") else "2", found[1]
    singular = [_singular(word) for word in re.findall(r"[^\W\d_]+|[^\s\w]", words)]
    return "".join(singular) + (f"^{power}" if power else "")


def _singular(word: str) -> str:
    word = word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
    return _SAME.get(word, word)


def is_unit(words: str) -> bool:
    """Whether ``words`` may be a unit: letters, none of ``NO_UNITS``, and no number."""
    found = re.findall(r"[^\W\d_]+", words.casefold())
    if not found or any(word in NO_UNITS or (word != "n" and _NUMBER_WORD.fullmatch(word)) for word in found):
        return False
    return re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ./'-])*", words) is not None
