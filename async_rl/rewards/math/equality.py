r"""Decides whether the row's answer and the model's answer are the same mathematics. ``answers`` calls it.

Both are written as plain LaTeX first (``notation``). Then there are three steps, and the first step that can decide
does. First, two plain numbers are compared exactly. Second, answers that are typeset alike are equal. Third,
``comparison`` reads both in a child process with a time limit, and compares what they say. An answer that can't be
read to its last token is equal only to one that is typeset alike. Colossal-RL has another fallback, which removes
spaces, braces and commas: there ``1,2`` equals ``12``, and ``\frac{1}{23}`` equals ``\frac{12}{3}``. The second step
here keeps such answers apart.

``spelled_out`` inserts the braces that the reader needs, because TeX takes the next character or group as an argument:
``\frac12`` is a half.
"""

from __future__ import annotations

import re
from fractions import Fraction

from async_rl.rewards.extraction import closing_brace
from async_rl.rewards.math.notation import in_latex
from async_rl.rewards.math.verifier import MathVerifier

MAX_ANSWER_CHARS = 1000
"""Maximum length of answers that are parsed. Longer answers are equal only if their texts are equal."""

MAX_NESTING = 16
"""Maximum depth of nested brackets in answers that are read, because the reader is recursive."""

_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+"
_DECIMAL = re.compile(rf"(?:(?P<whole>{_GROUPED}|[0-9]+)(?:\.(?P<part>[0-9]*))?|\.(?P<only_part>[0-9]+))")
_FRACTION = re.compile(r"(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+) ?/ ?(?P<bottom>[0-9]+)\.?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_SCIENTIFIC = re.compile(
    r"(?P<mantissa>[0-9.]+) ?(?:\\times|\\cdot|\u00d7|\*) ?10 ?\^ ?"
    r"(?:\{ ?(?P<wide>[+\-\u2212]?[0-9]{1,3}) ?\}|(?P<digit>[0-9]))\.?"
)
_SIGN = re.compile(r"(?:\\?\$)?\s*([+\-\u2212]?)\s*(?:\\?\$)?\s*")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_WRAPPER = re.compile(r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|mbox)\s*(?=\{)|(?=\{)")
_TEXT_WITH_DIGITS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}$\\]*[0-9][^{}$\\]*)\}\.?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '][^\W\d_]+)*")
_MIN_WORD_LETTERS = 4
_MIN_FLOAT_DIGITS = 12

_BASED = re.compile(
    r"(?P<digits>[0-9][0-9A-Za-z]*|[A-Fa-f][0-9A-Fa-f]+)_(?:\{\s*(?P<wide>[0-9]+)\s*\}|(?P<narrow>[0-9]))\.?"
)

_SIZES = re.compile(r"\\(left|right|big|Big|bigg|Bigg)([lrm]?)(?![A-Za-z])\s*")
_FRAC = re.compile(r"\\(?:[dtc]?(?P<name>frac)|[dt]?(?P<other>binom))(?![A-Za-z])\s*")
_ROOT = re.compile(r"\\sqrt(?![A-Za-z])\s*(?P<index>\[[^\[\]{}]*\])?\s*(?=[0-9A-Za-z])")
_SCRIPT = re.compile(r"\^\s*(?=\\(?:[dt]?frac|binom)(?![A-Za-z]))")
_COMMAND = re.compile(r"\\[A-Za-z]+")


def answers_equal(gold: str, prediction: str, *, verifier: MathVerifier, time_limit_s: float) -> bool:
    """Return whether ``prediction`` and ``gold`` are the same mathematics.

    Return False if the comparison by ``verifier`` times out or crashes. ``verifier`` counts such comparisons.

    Args:
        gold: the row's answer.
        prediction: the model's answer. It may be any text.
        verifier: reads and compares the answers, if the first two steps can't decide.
        time_limit_s: processor seconds that the verifier may use.

    Raises:
        RewardError: the verifier's processes can't be started.
    """
    gold, prediction = in_latex(gold), in_latex(prediction)
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


def plain_number(text: str) -> Fraction | None:
    r"""Return the exact value of ``text`` if it is a plain number, else None.

    Plain numbers are integers, decimals, fractions (``1/2``, ``\frac{1}{2}``), mixed numbers (``1 1/2``) and scientific
    notation (``1.2\times 10^3``). They may have a sign, a dollar sign, correct thousands separators and a full stop at
    the end: ``$1,234.50``, ``+.5``, ``-\frac12``, ``10\,000``.

    ``12,34``, ``1e3``, ``50%``, ``1/0`` and numbers with a unit are not plain numbers.
    """
    text = _unwrapped(text)
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


def _is_float_of(text: str, number: Fraction, exact: Fraction) -> bool:
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


def typeset_form(text: str) -> str:
    r"""Return the normal form of an answer in LaTeX. Two answers have the same normal form only if they print alike.

    ``\left( \dfrac{1}{2}, x^{2} \right)`` and ``(\frac{1}{2},x^2)`` have the same normal form. Math delimiters,
    commands around the whole text, a full stop at the end, and commands for size are removed. A space is removed unless
    there is a letter or digit on both sides. Braces are removed only around a single character after ``^`` or ``_``.
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
    """Return ``text`` without what encloses the whole text: math delimiters, ``\\boxed{}``, ``\\text{}`` and braces.

    A full stop at the end is removed too.
    """
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
    ``5 5`` is two numbers without a meaning. A subscript of one digit may (``\\log_2 3``).
    """
    if re.search(r"(?<!_)[0-9.] [0-9.]", form):
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


def based_integer(text: str) -> int | None:
    """Return the value of an integer with its base as a subscript: 54 for ``204_5``. None for any other text."""
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    base = int(found["wide"] or found["narrow"])
    if base != 16 and found["digits"].isalpha():  # AB_{12} is a name
        return None
    try:
        return int(found["digits"], base) if base >= 2 else None
    except ValueError:  # a digit that the base does not have, or a base over 36
        return None


def spelled_out(text: str) -> str:
    r"""Return the answer ``text`` with braces around all arguments, as ``reading`` needs it.

    Braces are put around the arguments of ``\frac``, ``\binom`` and ``\sqrt``, and around fractions in exponents.
    ``\frac94\pi`` becomes ``\frac{9}{4}\pi``, and ``x^\frac12`` becomes ``x^{\frac{1}{2}}``. ``\sqrt10`` stays, because
    it is a root of 1 in TeX, but its author probably means a root of 10.
    """
    text = _SIZES.sub(lambda found: f"\\{found[1]}{found[2]}" if found[1] in ("left", "right") else "", text)
    # From the last to the first, so that the contents of an argument are spelled out already.
    for found in reversed(list(_FRAC.finditer(text))):
        text = text[: found.start()] + _in_braces(f"\\{found['name'] or found['other']}", text, found.end())
    for found in reversed(list(_ROOT.finditer(text))):
        end = found.end() + 1
        if not text[end - 1].isdigit() or not text[end : end + 1].isdigit():
            text = f"{text[: found.start()]}\\sqrt{found['index'] or ''}{{{text[end - 1]}}}{text[end:]}"
    for found in reversed(list(_SCRIPT.finditer(text))):
        first = _argument_end(text, _COMMAND.match(text, found.end()).end())  # pyright: ignore[reportOptionalMemberAccess]
        second = None if first is None else _argument_end(text, first)
        if second is not None:
            text = f"{text[: found.start()]}^{{{text[found.end() : second]}}}{text[second:]}"
    return text


def _in_braces(command: str, text: str, start: int) -> str:
    """Return ``command`` with its two arguments in braces, followed by the rest of ``text``.

    The first argument begins at the index ``start``. If the arguments are unclear, no braces are added.
    """
    top_end = _argument_end(text, start)
    bottom_start = None if top_end is None else top_end + (len(text[top_end:]) - len(text[top_end:].lstrip()))
    bottom_end = None if bottom_start is None else _argument_end(text, bottom_start)
    if top_end is None or bottom_start is None or bottom_end is None:
        return command + text[start:]
    return f"{command}{_braced(text[start:top_end])}{_braced(text[bottom_start:bottom_end])}{text[bottom_end:]}"


def _argument_end(text: str, start: int) -> int | None:
    """Return the index after the TeX argument that begins at ``start``. None if the argument is unclear.

    An argument is a group in braces, a command without arguments, or one character.
    """
    if start >= len(text) or text[start] in "}^_&":
        return None
    if text[start] == "{":
        end = closing_brace(text, start)
        return None if end is None else end + 1
    if text[start] == "\\":
        command = _COMMAND.match(text, start)
        takes_some = command is not None and text[command.end() : command.end() + 1] in ("{", "[")
        return None if command is None or takes_some else command.end()
    return start + 1


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"
