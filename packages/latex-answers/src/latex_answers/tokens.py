r"""Splits an answer in LaTeX into tokens. ``reading`` calls it. Every character ends up in a token, or it is space.

A token's kind is one of

- ``number``: ``12``, ``0.5``, ``1,234``; its text has no separators of thousands,
- ``letter``: one letter; ``run``: several letters that are no known name, ``cm`` or ``abc``,
- ``command``: a command with its backslash, or a name that is used without one, ``\sin`` for ``sin``,
- ``text``: the content of ``\text{}`` and its like,
- ``sign``: everything else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from latex_answers.finding import UnreadableError
from latex_answers.notation import SINGLE_LETTER_UNITS, closing_brace


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    spaced: bool = False
    """Whether there is space before the token."""


SPACES = frozenset({
    "\\,", "\\;", "\\:", "\\!", "\\ ", "\\quad", "\\qquad", "\\thinspace", "\\medspace", "\\thickspace",
    "\\negthinspace", "\\negmedspace", "\\negthickspace", "\\displaystyle", "\\textstyle", "\\limits", "\\nolimits",
    "\\left", "\\right", "\\middle", "\\mleft", "\\mright", "\\big", "\\Big", "\\bigg", "\\Bigg", "\\bigl", "\\bigr",
    "\\Bigl", "\\Bigr", "\\biggl", "\\biggr", "\\Biggl", "\\Biggr", "\\bigm", "\\Bigm", "\\enspace", "\\relax",
})  # fmt: skip
SAME_COMMANDS = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\leq": "\\le", "\\leqslant": "\\le", "\\leqq": "\\le", "\\geq": "\\ge", "\\geqslant": "\\ge", "\\geqq": "\\ge",
    "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "\\lvert": "|(", "\\rvert": "|)", "\\vert": "|", "\\lVert": "||(",
    "\\rVert": "||)", "\\Vert": "||", "\\|": "||", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[",
    "\\rbrack": "]", "\\langle": "(", "\\rangle": ")", "\\ldots": "\\dots", "\\cdots": "\\dots", "\\dotsc": "\\dots",
    "\\dotsb": "\\dots", "\\rightarrow": "\\to", "\\longrightarrow": "\\to", "\\varnothing": "\\emptyset",
    "\\ast": "*", "\\degree": "\\circ", "\\land": "and", "\\lor": "or", "\\vee": "or", "\\wedge": "and", "\\colon": ":",
    "\\lg": "\\log", "\\imath": "i", "\\backslash": "\\setminus", "\\smallsetminus": "\\setminus",
    "\\varphi": "\\phi", "\\varepsilon": "\\epsilon", "\\percent": "%", "\\%": "%", "\\tg": "\\tan", "\\ctg": "\\cot",
    "\\infin": "\\infty", "\\bmod": "\\mod", "\\centerdot": "\\cdot", "\\operatorname": "\\text", "\\lnot": "\\neg",
}  # fmt: skip
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "sinh",
    "cosh", "tanh", "coth", "arsinh", "arcosh", "artanh", "arcsinh", "arccosh", "arctanh", "asin", "acos", "atan",
    "ln", "log", "exp", "gcd", "lcm", "min", "max", "det", "floor", "ceil", "abs", "sgn", "deg", "dim", "arg", "cis",
})  # fmt: skip
_PLAIN_NAMES = {
    "pi": "\\pi", "sqrt": "\\sqrt", "infinity": "\\infty", "inf": "\\infty", "oo": "\\infty", "mod": "\\mod",
    "theta": "\\theta", "alpha": "\\alpha", "beta": "\\beta", "and": "and", "or": "or", "percent": "%", "pct": "%",
    "percentage": "%", "union": "\\cup", "lg": "\\log", "lim": "\\lim",
}  # fmt: skip
_TEXT_COMMANDS = frozenset({
    "\\text", "\\textnormal", "\\textrm", "\\textbf", "\\textit", "\\textsf", "\\mbox", "\\mathrm", "\\operatorname",
    "\\operatorname*", "\\hbox", "\\rm",
})  # fmt: skip
_TOKEN = re.compile(
    r"(?P<space>\s+|~)|(?P<command>\\(?:operatorname\*|[A-Za-z]+|[^A-Za-z]))"
    r"|(?P<run>[A-Za-z]+(?![^\W\d_]))|(?P<text>[^\W\d_]+|\u00b0[CF])"
    r"|(?P<number>[0-9]+(?:\.[0-9]+)?\.?(?=\\overline|\\dot\{|\\bar)|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<sign>\.\.\.|:=|<=|>=|(?<![0-9)])!=|==|.)",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")
_WHOLE_DECIMAL_COMMA = re.compile(r"-?0,[0-9]{3,}")
_SIGN_NAMES = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne", "==": "=", ":=": "=", "...": "\\dots"}
_OPENING, _CLOSING = ("(", "[", "\\{"), (")", "]", "\\}")


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of ``text``, which is in the notation of ``notation.in_latex``.

    Raises:
        UnreadableError: a command for text has no closed braces, or its content is no words.
    """
    text = _without_separators(text)
    tokens: list[Token] = []
    index, spaced = 0, False
    while index < len(text):
        found = _TOKEN.match(text, index)
        assert found is not None  # the last alternative takes any character
        index = found.end()
        kind, piece = str(found.lastgroup), found[0]
        if kind == "space" or piece in SPACES or piece == "$":
            spaced = True
            continue
        if piece in _TEXT_COMMANDS:
            end = _end_of_text(text, index)
            tokens.append(_text_token(text[text.index("{", index) + 1 : end], spaced))
            index = end + 1
        else:
            tokens.append(_token(kind, piece, spaced))
        spaced = False
    return tokens


def _without_separators(text: str) -> str:
    r"""Return ``text`` without separators of thousands: ``1{,}234``, ``10,\!080``, and ``1,234`` that is no list."""
    text = re.sub(r"(?<=[0-9])(?:\s?\{\s?,\s?\}|,\\!)\s*(?=[0-9]{3})", "", text)
    text = re.sub(r"(?<![0-9])\.(?=\\overline|\\dot\{|\\bar)", "0.", text)
    if _WHOLE_DECIMAL_COMMA.fullmatch(text):
        return text.replace(",", ".")
    if "," not in text:
        return text
    numbers = [found for found in _THOUSANDS.finditer(text) if not _may_be_list(text, found.start())]
    for found in reversed(numbers):
        text = text[: found.start()] + found[0].replace(",", "") + text[found.end() :]
    return text


def _may_be_list(text: str, index: int) -> bool:
    """Whether a comma at ``index`` may separate items: in brackets, or in braces that hold no argument."""
    opened: list[bool] = []
    for found in re.finditer(r"\\?[({\[]|\\?[)}\]]", text[:index]):
        if found[0][-1] in "({[":
            is_argument = found[0] == "{" and re.search(r"(?:\\[A-Za-z]+|\}|\^)\s*$", text[: found.start()]) is not None
            opened.append(not is_argument)
        elif opened:
            opened.pop()
    return any(opened)


def _end_of_text(text: str, index: int) -> int:
    start = index + len(text[index:]) - len(text[index:].lstrip())
    end = closing_brace(text, start) if text[start : start + 1] == "{" else None
    if end is None:
        raise UnreadableError("text without braces")
    return end


def _token(kind: str, piece: str, spaced: bool) -> Token:
    if kind == "run":
        if len(piece) == 1:
            return Token("letter", piece, spaced)
        return _named(piece, spaced) or Token("run", piece, spaced)
    if kind == "sign":
        piece = _SIGN_NAMES.get(piece, piece)
        return Token("command" if piece.startswith("\\") else "sign", piece, spaced)
    if kind == "command":
        piece = SAME_COMMANDS.get(piece, piece)
        if piece in ("\\{", "\\}", "\\\\", "\\$") or not piece.startswith("\\"):
            return Token("letter" if piece == "i" else "sign", piece, spaced)
    return Token(kind, piece, spaced)


def _named(run: str, spaced: bool) -> Token | None:
    """Return the token of a name that is written without a backslash, or None."""
    if run in FUNCTIONS:
        return Token("command", "\\" + run, spaced)
    name = _PLAIN_NAMES.get(run) or _PLAIN_NAMES.get(run.lower() if len(run) > 3 else run)
    return None if name is None else Token("command" if name.startswith("\\") else "sign", name, spaced)


def _text_token(content: str, spaced: bool) -> Token:
    spaced = spaced or content[:1].isspace()
    content = re.sub(r"~|\\[,;:! ]|\\q?quad(?![A-Za-z])", " ", re.sub(r"\\(?:cdot|times)(?![A-Za-z])", "*", content))
    content = re.sub(r"\\(Omega|mu)\s*", lambda sign: "\u03a9" if sign[1] == "Omega" else "\u03bc", content)
    words = " ".join(content.split())
    bare = words.strip(" ,")
    named = _named(bare, spaced)
    if named is not None:
        return named
    in_brackets = re.fullmatch(r"\(([A-Za-z])\)", bare)
    if in_brackets is not None:
        return Token("letter", in_brackets[1], spaced)
    if re.fullmatch(r"[A-Za-z]", bare) and bare not in SINGLE_LETTER_UNITS:
        return Token("letter", bare, spaced)
    if re.search(r"[0-9\\$]", re.sub(r"\^\{?-?[1-9]\}?", "", words)):
        raise UnreadableError(f"no words: {words}")
    return Token("text", words, spaced)
