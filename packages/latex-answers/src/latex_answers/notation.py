r"""Writes an answer in LaTeX's own notation, before anything compares it. ``equality`` calls it.

People and models write the same answer with Unicode signs (``√2/2``, ``90°``), in Markdown (``**73**``), like a program
(``x**2+1``) and with letters in upright or bold type (``\mathrm{e}^2``). ``in_latex`` gives all of them one form. It
never drops a letter: an upright letter becomes the plain letter, and any other upright text stays as it is.
``closing_brace`` finds the end of a group.
"""

from __future__ import annotations

import re
import unicodedata

SINGLE_LETTER_UNITS = frozenset("mgshlLNJWVAKCF")
"""Upright letters that are a unit after a number, as in ``5\\,\\mathrm{m}``. All others are variables."""

_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u00f7": "\\div ",
    "\u00b1": "\\pm ", "\u2213": "\\mp ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2a7d": "\\le ",
    "\u2a7e": "\\ge ", "\u2260": "\\ne ",
    "\u2248": "\\approx ", "\u2261": "\\equiv ", "\u221e": "\\infty ", "\u222a": "\\cup ", "\u2229": "\\cap ",
    "\u2208": "\\in ", "\u2209": "\\notin ", "\u2205": "\\emptyset ", "\u2026": "\\ldots ", "\u22ef": "\\ldots ",
    "\u2192": "\\to ", "\u211d": "\\mathbb{R}", "\u2124": "\\mathbb{Z}", "\u2115": "\\mathbb{N}",
    "\u211a": "\\mathbb{Q}", "\u2102": "\\mathbb{C}", "\u00b0": "^\\circ ", "\u2103": "\u00b0C", "\u2109": "\u00b0F",
    "\u2032": "'", "\u2033": "''", "\u2019": "'", "\u2018": "'", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    "\u221b": "\\sqrt[3]", "\u221a": "\\sqrt", "\u2044": "/", "\u3001": ",", "\u3002": ".", "\uff5b": "\\{",
    "\uff5d": "\\}",
}  # fmt: skip
_GREEK = {
    "\u03b1": "alpha", "\u03b2": "beta", "\u03b3": "gamma", "\u03b4": "delta", "\u03b5": "epsilon", "\u03b8": "theta",
    "\u03bb": "lambda", "\u03bc": "mu", "\u00b5": "mu", "\u03c0": "pi", "\u03c1": "rho", "\u03c3": "sigma",
    "\u03c4": "tau", "\u03c6": "phi", "\u03d5": "phi", "\u03c8": "psi", "\u03c9": "omega", "\u0394": "Delta",
    "\u03a9": "Omega", "\u03a3": "Sigma", "\u03a0": "Pi",
}  # fmt: skip
_COMPATIBLE = ("<wide>", "<narrow>", "<font>", "<fraction>", "<compat>", "03")
"""How Unicode's data begin of signs that are written otherwise: forms of others, and of Greek letters."""
_RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f", "0123456789-n")
_LOWERED = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")
_RAISED_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b\u207f]+")
_LOWERED_RUN = re.compile("[\u2080-\u2089]+")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_POWER = re.compile(r"\*\*\s*(?:(?P<number>[+-]?[0-9]+(?:\.[0-9]+)?)|(?=\S))")
_ROOT_SIGN = re.compile(r"(?P<root>\\sqrt(?:\[3\])?)(?P<number>[0-9]+(?:\.[0-9]+)?)")
_RM = re.compile(r"\{\s*\\(?P<font>rm|bf|it)\s+(?P<letter>[A-Za-z]|\\pi)\s*\}")
_UPRIGHT = re.compile(
    r"\\(?P<font>mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|pmb|operatorname\*?|text|textrm|textnormal|textbf"
    r"|textit|mbox|rm)\s*(?:\{\s*(?P<letter>[A-Za-z]|\\[a-zA-Z]+)\s*\}|\s(?P<bare>[A-Za-z])(?![A-Za-z]))"
)
_IS_A_FONT = frozenset({"mathbf", "mathit", "mathsf", "mathnormal", "boldsymbol", "bm", "pmb"})
_BOLD_GROUP = re.compile(r"\\(?:mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|pmb)\s*(?=\{)")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z]{2})")
"""Two backslashes before two letters are a command with an escaped backslash, and no line break."""
_BARE_ALPHABET = re.compile(r"(?P<font>\\math(?:bb|cal|frak|scr))\s*(?P<letter>[A-Z])(?![A-Za-z])")
_SUCH_THAT = re.compile(r"(?P<head>\\\{\s*[A-Za-z](?:\s*\\in\s*\\mathbb\{[A-Z]\})?)\s*(?:\||:|\\colon(?![A-Za-z]))")
"""The sign after the name in ``\\{x : x>2\\}`` or ``\\{x | x>2\\}``."""
_NEGATED = re.compile(r"\\not\s*(?P<relation>=|\\in(?![A-Za-z])|\\mid(?![A-Za-z])|\|)")
_NEGATIONS = {"=": "\\ne ", "\\in": "\\notin ", "\\mid": "\\nmid ", "|": "\\nmid "}
_MONEY = re.compile("(?P<before>[\u20ac\u00a3\u00a5]) ?(?P<number>[0-9][0-9.,]*)|(?P<after>[\u20ac\u00a3\u00a5])")
_CURRENCIES = {"\u20ac": "\\text{ euro}", "\u00a3": "\\text{ pound sterling}", "\u00a5": "\\text{ yen}"}
_LOOKS = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:bf|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])")
_GIVEN = re.compile(r"(?<=\()([^()|]*)(?<![\\|])\|(?=[^()|]*\))")
"""The only bar in a pair of brackets, as in ``P(A|B)``."""
_COMPOSED = re.compile(r"\(\s*([A-Za-z])\s*\\circ\s*([A-Za-z])\s*\)\s*\(([^()]*)\)")
_SLANTED = re.compile(r"(?<![\w)}\]])\^\{?([0-9]+)\}?/_\{?([0-9]+)\}?")
_DEGREE = re.compile(r"\^?(?:\{\s*\\degree\s*\}|\\degree(?![A-Za-z])|\{\s*\\circ\s*\})")
_TEMPERATURE = re.compile(
    r"(?:\{\})?\^\s*\\circ(?:\s|~|\\[,;:! ])*+(?:\\(?:text|mathrm|textrm|rm)\s*\{\s*([CF])\s*\}|([CF])(?![A-Za-z]))"
)
_MINUTES = re.compile(r"([0-9.]+)\^\\circ\s*([0-9]+)(?:'|\^\{?\\prime\}?)(?!')(?:\s*([0-9]+)'')?")
_CASES = re.compile(r"(?:\\left\\\{\s*)?\\begin\{(cases|aligned)\}([^&]*)\\end\{\1\}(?:\s*\\right\.)?")
_ENDS_IN_A_COMMAND = re.compile(r"\\[A-Za-z]+$")


def in_latex(text: str) -> str:
    """Return ``text`` with Unicode signs, Markdown, ``**`` and upright letters written as plain LaTeX."""
    text = _without_markdown(re.sub(r"(?<!\\)[,;]\Z", "", text.strip()))
    if not text.isascii():
        text = _from_unicode(text)
    if "**" in text:
        text = _POWER.sub(lambda found: f"^{{{found['number']}}}" if found["number"] else "^", text)
    if "\\" in text:
        if "\\begin" not in text:
            text = _DOUBLED.sub(r"\\", text)
        text = _BARE_ALPHABET.sub(r"\g<font>{\g<letter>}", text)
        text = _SUCH_THAT.sub(r"\g<head>\\mid ", text)
        text = _NEGATED.sub(lambda found: _NEGATIONS[found["relation"]], text)
        text = _RM.sub(_letter, text)
        text = _UPRIGHT.sub(_letter, text)
        text = _BOLD_GROUP.sub("", text)
        text = _LOOKS.sub("", text)
        text = _COMPOSED.sub(r"\1(\2(\3))", text)
        text = _TEMPERATURE.sub(lambda found: f"\u00b0{found[1] or found[2]}", _DEGREE.sub(r"^\\circ ", text))
        text = _MINUTES.sub(lambda found: f"({found[1]}+{found[2]}/60+{found[3] or 0}/3600)^\\circ ", text)
        cases = _CASES.fullmatch(text)
        text = text if cases is None else re.sub(r",?\s*\\\\", ",", cases[2].strip().removesuffix("\\\\"))
    text = _SLANTED.sub(r"\\frac{\1}{\2}", text)
    return _GIVEN.sub(r"\1\\mid ", text)


def _without_markdown(text: str) -> str:
    """Return ``text`` without the marks of bold type around the whole text, and without a full stop after them."""
    body = text.removesuffix(".")
    inside = body[2:-2].strip()
    is_bold = body[:2] in ("**", "__") and body[-2:] == body[:2] and "**" not in inside and "__" not in inside
    return inside if is_bold and inside else text


def _from_unicode(text: str) -> str:
    text = _MONEY.sub(lambda found: (found["number"] or "") + _CURRENCIES[found["before"] or found["after"]], text)
    has_roots = "\u221a" in text or "\u221b" in text
    text = _RAISED_RUN.sub(lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = _LOWERED_RUN.sub(lambda found: f"_{{{found[0].translate(_LOWERED)}}}", text)
    text = _NOT_ASCII.sub(_command_for, text)
    return _ROOT_SIGN.sub(r"\g<root>{\g<number>}", text) if has_roots else text


def _command_for(found: re.Match[str]) -> str:
    """Return a sign as LaTeX. Full-width signs, signs of a font and fractions are first made of ordinary signs."""
    sign = found[0]
    if sign not in _SIGNS and unicodedata.decomposition(sign).startswith(_COMPATIBLE):
        sign = unicodedata.normalize("NFKC", sign)
    if "\u2044" in sign[1:]:
        return "\\frac{{{}}}{{{}}}".format(*sign.split("\u2044"))
    return f"\\{_GREEK[sign]} " if sign in _GREEK else _SIGNS.get(sign, sign)


def _letter(found: re.Match[str]) -> str:
    """Return the letter of an upright letter. Units and commands that are no letters stay as they are."""
    groups = found.groupdict()
    letter = groups["letter"] or groups["bare"]
    is_unit = groups["font"] not in _IS_A_FONT and letter in SINGLE_LETTER_UNITS
    if is_unit or (letter.startswith("\\") and letter != "\\pi" and groups["font"] not in _IS_A_FONT):
        return found[0]
    before, after = found.string[: found.start()], found.string[found.end() : found.end() + 1]
    if before.rstrip().endswith(("^", "_")):
        return f"{{{letter}}}"
    lead = " " if _ENDS_IN_A_COMMAND.search(before) else ""
    return lead + letter + (" " if letter.startswith("\\") and after.isalpha() else "")


def closing_brace(text: str, opening: int) -> int | None:
    """Return the index of the brace that closes the brace at index ``opening``. None if no brace closes it."""
    depth = 0
    position = opening
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # skips the escaped character
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None
