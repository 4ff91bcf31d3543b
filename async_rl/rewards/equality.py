r"""Are two answers the same mathematics? Called by the math reward with the row's answer and an extracted one.

Three steps, the first that decides wins: two plain numbers are compared exactly; answers that are typeset alike are
equal; anything else is asked of math_verify in a child process under a time limit. Colossal-RL's fallback (compare
after removing spaces, braces and commas) is replaced by the second step, which never joins what is apart: there
``1,2`` equals ``12`` and ``\frac{1}{23}`` equals ``\frac{12}{3}``, here they don't.
"""

from __future__ import annotations

import re
from fractions import Fraction

from async_rl.rewards.differences import surely_different
from async_rl.rewards.extraction import closing_brace
from async_rl.rewards.tex import spelled_out
from async_rl.rewards.verifier import MathVerifier

MAX_ANSWER_CHARS = 1000
"""Longer answers are compared as text only; they are never parsed."""

MAX_NESTING = 16
"""More deeply nested answers are never parsed: parsers recurse."""

_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+"
_DECIMAL = re.compile(rf"(?:(?P<whole>{_GROUPED}|[0-9]+)(?:\.(?P<part>[0-9]*))?|\.(?P<only_part>[0-9]+))\.?")
_FRACTION = re.compile(r"(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+) ?/ ?(?P<bottom>[0-9]+)\.?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_SIGN = re.compile(r"\\?\$?\s*([+\-\u2212]?)\s*\\?\$?\s*")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_WRAPPER = re.compile(r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|mbox)\s*(?=\{)|(?=\{)")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '][^\W\d_]+)*")
_MIN_WORD_LETTERS = 4
_MIN_FLOAT_PLACES = 12


def answers_equal(gold: str, prediction: str, *, verifier: MathVerifier, time_limit_s: float) -> bool:
    """Whether ``prediction`` states the answer ``gold``. A comparison that times out or crashes says no.

    Args:
        gold: the row's answer, trusted.
        prediction: the model's, hostile.
        verifier: counts what timed out.
        time_limit_s: wall-clock seconds for math_verify.

    Raises:
        RewardError: the verifier does not start.
    """
    gold, prediction = gold.strip(), prediction.strip()
    if not gold or not prediction:
        return False
    if max(len(gold), len(prediction)) > MAX_ANSWER_CHARS:
        return gold == prediction
    gold_number, number = plain_number(gold), plain_number(prediction)
    if gold_number is not None and number is not None:
        return gold_number == number or _is_float_of(prediction, number, gold_number)
    gold_text, text = typeset_form(gold), typeset_form(prediction)
    if gold_text == text:
        return True
    if surely_different(gold_text, text):
        return False
    if _are_words(gold, gold_text, prediction, text):
        return gold_text.casefold() == text.casefold()
    if not (_is_parsable(gold_text) and _is_parsable(text)):
        return False
    return verifier.ask(spelled_out(gold), spelled_out(prediction), time_limit_s) == "equal"


def canonical_form(answer: str) -> Fraction | str:
    """What two answers share only if ``answers_equal`` calls them equal without asking the verifier.

    Answers that share none may be equal all the same: ``x+1`` and ``1+x``.
    """
    answer = answer.strip()
    if len(answer) > MAX_ANSWER_CHARS:
        return answer
    number = plain_number(answer)
    if number is not None:
        return number
    form = typeset_form(answer)
    return form.casefold() if _are_words(answer, form, answer, form) else form


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of a plain number; None if ``text`` is anything else.

    Integers, decimals, fractions (``1/2``, ``\frac{1}{2}``) and mixed numbers (``1 1/2``), with an optional sign,
    dollar sign, thousands separators where they belong and a full stop at the end: ``$1,234.50``, ``+.5``,
    ``-\frac12``, ``10\,000``. Not ``12,34``, ``1e3``, ``50%``, ``1/0`` or anything with a unit.
    """
    text = _unwrapped(text)
    text = re.sub(r"\{,\}|,\\!", ",", text)
    text = re.sub(r"\\[,;: ]|~", " ", text)
    text = _LATEX_FRACTION.sub(lambda found: f" {found[1] or found[2]}/{found[3] or found[4]} ", text)
    text = re.sub(r"\s+", " ", text).strip()
    lead = _SIGN.match(text)
    assert lead is not None  # every part of it is optional
    rest = text[lead.end() :]
    value = _decimal(rest) if "/" not in rest else _fraction(rest)
    return value if value is None or lead[1] in ("", "+") else -value


def _decimal(text: str) -> Fraction | None:
    found = _DECIMAL.fullmatch(text)
    if found is None:
        return None
    whole = re.sub("[, ]", "", found["whole"] or "0")
    part = found["part"] or found["only_part"] or "0"
    return Fraction(f"{whole}.{part}")


def _fraction(text: str) -> Fraction | None:
    found = _FRACTION.fullmatch(text)
    if found is None or int(found["bottom"]) == 0:
        return None
    return int(found["whole"] or 0) + Fraction(int(found["top"]), int(found["bottom"]))


def _is_float_of(text: str, number: Fraction, exact: Fraction) -> bool:
    """Whether a decimal of so many places that a computer must have written it is ``exact``, rounded or cut there."""
    places = re.search(r"\.([0-9]+)", text)
    return (
        places is not None
        and len(places[1]) >= _MIN_FLOAT_PLACES
        and abs(number - exact) < Fraction(1, 10 ** len(places[1]))
    )


def typeset_form(text: str) -> str:
    r"""A form that two texts share only if they print alike.

    ``\left( \dfrac{1}{2}, x^{2} \right)`` and ``(\frac{1}{2},x^2)`` share one.
    Removes math delimiters, wrappers around the whole, a full stop at the end, sizing commands, and space that has no
    letter or digit on one of its sides; drops braces only around a single character after ``^`` or ``_``.
    """
    text = _unwrapped(text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", "", text)
    text = re.sub(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"([\^_])\s*\{\s*([^\s{}\\])\s*\}", r"\1\2 ", text)
    text = re.sub(r"\s+", " ", text)
    # "5 .5" is not "5.5", and "1, 234" is two numbers.
    text = re.sub(r" (?=[^\w.])|(?<=[^\w.]) (?![0-9]{3}(?![0-9]))", "", text)
    return text.strip()


def _unwrapped(text: str) -> str:
    """``text`` without what surrounds all of it: math delimiters, ``\\boxed{}``, ``\\text{}``, braces, a full stop."""
    while True:
        before = text = text.strip()
        if text.endswith(".") and not text.endswith(("..", "\\.")):
            text = text[:-1].rstrip()
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and opening not in inner:
                text = inner
                break
        wrapper = _WRAPPER.match(text)
        if wrapper is not None and closing_brace(text, wrapper.end()) == len(text) - 1:
            text = text[wrapper.end() + 1 : -1]
        if text in (before, ""):
            return before


def _are_words(gold: str, gold_form: str, prediction: str, form: str) -> bool:
    """Both are words rather than products of variables. To math_verify, "listen" equals "silent".

    Bare letters count as words from ``_MIN_WORD_LETTERS`` on: ``ab`` may well equal ``ba``.
    """
    if _WORDS.fullmatch(gold_form) is None or _WORDS.fullmatch(form) is None:
        return False
    is_text = any("\\text" in side or "\\mbox" in side for side in (gold, prediction))
    return is_text or min(len(gold_form), len(form)) >= _MIN_WORD_LETTERS


def _is_parsable(form: str) -> bool:
    """Fit for math_verify: braces match and don't nest deeply, and no two numbers stand side by side.

    It would read ``5 5`` as 10, and ``5}{6`` as 5.
    """
    if re.search(r"[0-9.] [0-9.]", form):
        return False
    depth = deepest = 0
    for character in re.sub(r"\\.", "", form, flags=re.DOTALL):
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0 and deepest <= MAX_NESTING
