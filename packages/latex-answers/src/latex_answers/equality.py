r"""Decides whether an answer is the same mathematics as the right one. These are the functions of the package.

Both are written as plain LaTeX first (``notation``). Then there are three steps, and the first step that can decide
does. First, two plain numbers are compared exactly. Second, answers that are typeset alike are equal. Third,
``comparison`` reads both and compares what they say; only this step needs sympy, and only it may take long. An answer
that can't be read to its last token is equal only to one that is typeset alike. Colossal-RL has another fallback, which
removes spaces, braces and commas: there ``1,2`` equals ``12``, and ``\frac{1}{23}`` equals ``\frac{12}{3}``. The
second step here keeps such answers apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from latex_answers.arguments import spelled_out
from latex_answers.finding import Finding, UnreadableError
from latex_answers.notation import in_latex
from latex_answers.numbers import based_integer, is_float_of, plain_number
from latex_answers.typesetting import typeset_form

if TYPE_CHECKING:
    from latex_answers.reading import Reading

MAX_ANSWER_CHARS = 1000
"""Maximum length of answers that are parsed. Longer answers are equal only if their texts are equal."""

MAX_NESTING = 16
"""Maximum depth of nested brackets in answers that are read, because the reader is recursive."""

_TEXT_WITH_DIGITS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}$\\]*[0-9][^{}$\\]*)\}\.?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '][^\W\d_]+)*")
_OPTION = re.compile(r"\A(?:option|choice|answer):? ?\(?([A-Z])\)?\Z", re.IGNORECASE)
_MIN_WORD_LETTERS = 4

Other = TypeVar("Other", bound=str)


def equal(answer: str, gold: str) -> bool:
    """Return whether ``answer`` is right, if ``gold`` is.

    The order matters where something may be missing: ``5`` is an answer to ``x=5``, ``12`` to ``12_5``. The comparison
    has no time limit; ``compare_by`` lets a caller run the part that may take long elsewhere.

    Args:
        answer: the answer to judge, in LaTeX or as people and programs write it. Any text.
        gold: the right answer.
    """
    return compare(answer, gold) == "equal"


def compare(answer: str, gold: str) -> Finding:
    """Compare as ``equal`` does, and return also why two answers are not equal."""
    return compare_by(_in_this_process, answer, gold)


def compare_by(read: Callable[[str, str], Other], answer: str, gold: str) -> Finding | Other:
    """Compare as ``equal`` does, but let ``read`` compare what only the reader can.

    Args:
        read: a function of the answer and the right answer, both in the notation of the reader. It may run
            ``comparison.same_answers`` in a process that it can end.
        answer: the answer to judge.
        gold: the right answer.

    Returns:
        The finding of the first two steps, or else what ``read`` returns.
    """
    gold, answer = in_latex(gold), in_latex(answer)
    if not gold or not answer:
        return "unreadable"
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        return "equal" if gold == answer else "unreadable"
    gold_number, number = plain_number(gold), plain_number(answer)
    if gold_number is not None and number is not None:
        return _finding(gold_number == number or is_float_of(answer, number, gold_number))
    gold_form, form = typeset_form(gold), _OPTION.sub(r"\1", typeset_form(answer))
    if gold_form == form:
        return "equal"
    based_value, value = based_integer(gold_form), based_integer(form)
    if based_value is not None and value is not None:
        return _finding(based_value == value)
    if based_value is not None and gold_form.startswith(form + "_"):  # only the answer may lack its base
        return "equal"
    if _are_words(gold, gold_form, answer, form):
        return _finding(gold_form.casefold() == form.casefold())
    if not (_is_parsable(gold_form) and _is_parsable(form)):
        return "unreadable"
    return read(_for_reader(answer), _for_reader(gold))


def parse(answer: str) -> Reading:
    r"""Read one answer, and return what it says: ``parse("\\frac12").value`` is a half of sympy.

    ``latex_answers.values`` describes the values that are no expressions: sets, relations, numbers with a unit.

    Raises:
        UnreadableError: the answer has a part that the reader does not know or sympy can't compute, its brackets don't
            match, it is empty or longer than ``MAX_ANSWER_CHARS``.
    """
    from latex_answers.comparison import SYMPY_ERRORS
    from latex_answers.reading import read

    text = in_latex(answer)
    if not text or len(text) > MAX_ANSWER_CHARS or not _is_parsable(typeset_form(text)):
        raise UnreadableError(
            f"expected matching brackets, an operator between numbers and 1 to {MAX_ANSWER_CHARS} characters, "
            f"got {text!r:.80}"
        )
    try:
        return read(_for_reader(text))
    except SYMPY_ERRORS as error:
        raise UnreadableError(f"sympy can't compute {text!r:.80}: {error}") from error


def canonical_form(answer: str) -> Fraction | str:
    """Return a key of ``answer`` for comparisons without the reader. Answers with the same key are equal.

    Equal answers can have different keys, for example ``x+1`` and ``1+x``. The key of what says nothing is empty.
    """
    answer = in_latex(answer)
    if len(answer) > MAX_ANSWER_CHARS:
        return answer
    number = plain_number(answer)
    if number is not None:
        return number
    form = typeset_form(answer)
    return form.casefold() if _are_words(answer, form, answer, form) else form


def _in_this_process(answer: str, gold: str) -> Finding:
    from latex_answers.comparison import same_answers  # sympy, which most comparisons do not need

    return same_answers(answer, gold)


def _finding(is_equal: bool) -> Finding:
    return "equal" if is_equal else "different"


def _for_reader(text: str) -> str:
    """Return ``text`` with all arguments in braces, and ``5 cm`` for ``\\text{5 cm}``, if that is the whole answer."""
    found = _TEXT_WITH_DIGITS.fullmatch(text)
    return spelled_out(text if found is None else found[1])


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
