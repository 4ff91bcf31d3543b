"""Words after a number: units, which are compared, and what was counted, which is not. ``quantities`` calls it.

A number that stands alone may be followed by units (``kg m^2``), by what was counted (``people at the party``), or by
how (``each``). What was counted stands in the plural, so an unknown word in the singular is none of these: ``kilo`` and
``tripled`` need no list. A word that changes, denies or compares the number is refused at any place.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from importlib.resources import files

_LISTS = tomllib.loads(files("latex_answers").joinpath("words.toml").read_text("utf-8"))
LEADS = frozenset(_LISTS["leads"])
_WORDS = {use: frozenset(words.split()) for use, words in _LISTS["words"].items()}
SHORT_WORDS = _WORDS["short"]
_SYMBOL = re.compile(
    r"(?:[fpnmcdhkMGT\u03bc]|da)?(?:[gmsAKNJWVCFHTSL\u03a9]|mol|cd|Hz|Pa|Wb|Bq|Gy|eV|cal|bar|Wh)|[kMGT]?B"
    r"|min|h|ft|yd|mi|lb|oz|cc|rpm|dB|ppm|psi|atm|\u00b0[CF]"
)
"""Units whose letters have a case: ``Mg`` is not ``mg``."""
_NAMES = {name: symbol for symbol, names in _LISTS["units"].items() for name in names.split()}
_NAMES |= {
    prefix + name: letter + symbol
    for prefix, letter in _LISTS["prefixes"].items()
    for name, symbol in _NAMES.items()
    if _SYMBOL.fullmatch(letter + symbol)
}
_COUNTED = re.compile(
    r"[^\W\d_]{2,}[^\Wsui]s|(?:\w*wo)?men|people|children|teeth|geese|mice|dice|oxen|fish|sheep|deer|cattle|data|radii"
    r"|[\u4e2a\u53ea\u652f\u4ef6\u6761\u5f20\u672c\u540d\u4f4d\u4eba\u68f5\u8f86\u5757\u9897\u79cd\u6b21\u500d\u676f]\w*"
)
"""Plurals, and what begins with a measure word in Chinese."""
_NUMBER_WORD = re.compile(
    r"(?:\w+-)?(?:(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|hundred|thousand|[a-z]+illion"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|lakh|crore|gross|dozen|score)"
    r"(?:s|ths?)?"
    r"|(?:half|halve|third|quarter|fifth|eighth|ninth|twelfth|(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet)ieth)s?)"
)
"""Numbers and fractions in words. They make another number too: ``5 million``, ``5 twelfths``."""
_NO_WORD = re.compile(
    r"\w*n't|\w+wards?"
    r"|\w*[\u4e07\u4ebf\u5343\u767e\u5341\u534a\u4e0d\u975e\u6ca1\u672a\u9519\u4ee5\u591a\u7ea6\u4f59\u51e0\u6216\u548c\u4e4b]\w*"
)
"""Negations, comparisons, and the like in Chinese."""
_TIMES = re.compile(r"\btimes\b(?!\s*$|\s+(?:as|a|an|per|in|each|\w+er)\b)")
"""``times`` before a factor, and not as in ``6 times`` or ``3 times as many``."""
_ENDINGS = ("ed", "en", "er", "ing", "s")
"""How words may end that follow what was counted, beside those of the list ``after``."""
_POWERS = {"square": 2, "sq": 2, "\u5e73\u65b9": 2, "cubic": 3, "cu": 3, "\u7acb\u65b9": 3}
_PIECE = re.compile(r"\u5e73\u65b9|\u7acb\u65b9|\u00b0?[^\W\d_]+(?:[.'-][^\W\d_]+)*\.?|\^\{?-?[1-9]\}?|[/*()]")


def unit_name(text: str, *, is_single: bool = False) -> str | None:
    """Return the units that ``text`` names, so that the same units have the same name.

    ``square inches``, ``in^2`` and ``Inches^2`` are all ``inch^2``. What was counted is a unit too, up to its noun. The
    name is empty for words such as ``each``. It is None if ``text`` may not follow a number.

    Args:
        text: the words, with ``*`` for a product and powers as ``^2`` or ``^{-1}``.
        is_single: the number is 1 or less, so that what was counted may stand in the singular.
    """
    text = text.replace("left over", "leftover")
    pieces = _PIECE.findall(text)
    words = [piece.casefold().replace(".", "") for piece in pieces]
    if "".join(pieces) != "".join(text.split()) or _TIMES.search(" ".join(words)) or any(map(changes_number, words)):
        return None
    factors, nouns = Counter[str](), list[str]()
    is_counted, last = False, ""
    group = side = power = 1  # the sign of powers below a slash is -1
    for piece, word, after in zip(pieces, words, (*words[1:], ""), strict=False):
        if word in _WORDS["prepositions"] and after.isalpha() and (factors or nouns or word in _WORDS["first"]):
            is_counted = is_counted or not nouns
            break
        if word in ("/", "per", "an") or piece == "a":
            side = -1
        elif word in ("(", ")"):
            group = side = side if word == "(" else 1
        elif piece[0] == "^" or word in ("squared", "cubed"):
            if not last:
                return None
            factors[last] *= {"squared": 2, "cubed": 3}.get(word) or int(piece.strip("^{}"))
        elif word in _POWERS:
            power = _POWERS[word]
        elif word in _WORDS["alone"]:
            is_counted = is_counted or not nouns
        elif word != "*":
            symbol = _symbol(piece) or (_singular(word) if side < 0 and len(word) > 2 else "")
            is_noun = _COUNTED.fullmatch(word) is not None
            may_follow = len(word) > 2 and (not (is_counted and nouns) or word.endswith(_ENDINGS))
            if not (symbol or is_noun or may_follow or word in _WORDS["after"]):
                return None
            for sign, last in zip((1, -1), symbol.split("/") if symbol else (), strict=False):
                factors[last] += sign * side * power
            if not symbol and not is_counted:
                nouns.append(_singular(word))
            is_counted = is_counted or bool(symbol) or is_noun
            side, power = group, 1
    if not is_counted and not (is_single and nouns):
        return None
    factors.update([" ".join(nouns)] if nouns else [])
    return " ".join(name if exponent == 1 else f"{name}^{exponent}" for name, exponent in sorted(factors.items()))


def changes_number(word: str) -> bool:
    """Whether ``word`` makes another number of the one before it, or says something of it."""
    return word in _WORDS["changes"] or bool(
        _NUMBER_WORD.fullmatch(word) or (_NO_WORD.fullmatch(word) and not _symbol(word))
    )


def _singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word


def _symbol(word: str) -> str:
    """Return the symbol of a unit. Empty if the word is none that is known."""
    plain = word.casefold().replace(".", "")
    name = plain if plain in _NAMES else _singular(plain)
    return _NAMES.get(name) or next((symbol for symbol in (word, plain) if _SYMBOL.fullmatch(symbol)), "")
