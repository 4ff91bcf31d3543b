r"""Decides whether the row's answer and the model's answer are the same mathematics. ``answers`` calls it.

Both are written as plain LaTeX first (``notation``). Then there are three steps, and the first step that can decide
does. First, two plain numbers are compared exactly. Second, answers that are typeset alike are equal. Third,
``comparison`` reads both in a child process with a time limit, and compares what they say. An answer that can't be
read to its last token is equal only to one that is typeset alike. Colossal-RL has another fallback, which removes
spaces, braces and commas: there ``1,2`` equals ``12``, and ``\frac{1}{23}`` equals ``\frac{12}{3}``. The second step
here keeps such answers apart.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Protocol

from latex_answers.arguments import spelled_out
from latex_answers.notation import in_latex
from latex_answers.numbers import based_integer, is_float_of, plain_number
from latex_answers.typesetting import typeset_form

MAX_ANSWER_CHARS = 1000
"""Maximum length of answers that are parsed. Longer answers are equal only if their texts are equal."""

MAX_NESTING = 16
"""Maximum depth of nested brackets in answers that are read, because the reader is recursive."""

_TEXT_WITH_DIGITS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}$\\]*[0-9][^{}$\\]*)\}\.?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '][^\W\d_]+)*")
_OPTION = re.compile(r"\A(?:option|choice|answer):? ?\(?([A-Z])\)?\Z", re.IGNORECASE)
_MIN_WORD_LETTERS = 4


class Verifier(Protocol):
    """Compares two answers by the reader, within a time limit."""

    def ask(self, gold: str, prediction: str, time_limit_s: float) -> str: ...


def answers_equal(gold: str, prediction: str, *, verifier: Verifier, time_limit_s: float) -> bool:
    """Return whether ``prediction`` and ``gold`` are the same mathematics.

    Return False if the comparison by ``verifier`` is not computed, times out or crashes. ``verifier`` counts these.

    Args:
        gold: the row's answer.
        prediction: the model's answer. It may be any text.
        verifier: reads and compares the answers, if the first two steps can't decide.
        time_limit_s: processor seconds that the verifier may use.

    Raises:
        Exception: what ``verifier`` raises.
    """
    gold, prediction = in_latex(gold), in_latex(prediction)
    if not gold or not prediction:
        return False
    if max(len(gold), len(prediction)) > MAX_ANSWER_CHARS:
        return gold == prediction
    gold_number, number = plain_number(gold), plain_number(prediction)
    if gold_number is not None and number is not None:
        return gold_number == number or is_float_of(prediction, number, gold_number)
    gold_text, text = typeset_form(gold), _OPTION.sub(r"\1", typeset_form(prediction))
    if gold_text == text:
        return True
    based_value, value = based_integer(gold_text), based_integer(text)
    if based_value is not None and value is not None:
        return based_value == value
    if based_value is not None and gold_text.startswith(text + "_"):  # only the model's answer may lack its base
        return True
    if _are_words(gold, gold_text, prediction, text):
        return gold_text.casefold() == text.casefold()
    if not (_is_parsable(gold_text) and _is_parsable(text)):
        return False
    gold, prediction = spelled_out(_plain_text(gold)), spelled_out(_plain_text(prediction))
    return verifier.ask(gold, prediction, time_limit_s) == "equal"


def canonical_form(answer: str) -> Fraction | str:
    """Return a key of ``answer`` for comparisons without the verifier. Answers with the same key are equal.

    Equal answers can have different keys, for example ``x+1`` and ``1+x``.
    """
    answer = in_latex(answer)
    if len(answer) > MAX_ANSWER_CHARS:
        return answer
    number = plain_number(answer)
    if number is not None:
        return number
    form = typeset_form(answer)
    return form.casefold() if _are_words(answer, form, answer, form) else form


def _plain_text(text: str) -> str:
    """Return ``5 cm`` for ``\\text{5 cm}``. Text that is more or less than the whole answer stays."""
    found = _TEXT_WITH_DIGITS.fullmatch(text)
    return text if found is None else found[1]


def _are_words(gold: str, gold_form: str, prediction: str, form: str) -> bool:
    """Return whether both answers are words, not products of variables. As products, "listen" equals "silent".

    ``gold_form`` and ``form`` are the answers in ``typeset_form``. Letters without ``\\text{}`` count as a word only
    from ``_MIN_WORD_LETTERS`` letters on, because ``ab`` and ``ba`` may be equal products.
    """
    if _WORDS.fullmatch(gold_form) is None or _WORDS.fullmatch(form) is None:
        return False
    is_text = any("\\text" in side or "\\mbox" in side for side in (gold, prediction))
    are_capitals = min(len(gold_form), len(form)) > 1 and gold_form.isupper() and form.isupper()  # BCA is no product
    return is_text or are_capitals or min(len(gold_form), len(form)) >= _MIN_WORD_LETTERS


def _is_parsable(form: str) -> bool:
    """Return whether it is safe to read an answer. ``form`` is the answer in ``typeset_form``.

    All brackets must match and must not be nested deeper than ``MAX_NESTING``. No two numbers may be adjacent:
    ``5 5`` is two numbers without a meaning. A script of one digit may (``\\log_2 3``, ``\\sin^2 20``).
    """
    if re.search(r"(?<![_^])[0-9.] [0-9.]", form):
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
