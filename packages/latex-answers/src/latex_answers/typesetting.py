r"""The normal form of answers that print alike, such as ``\left( x \right)`` and ``(x)``. ``equality`` calls it."""

from __future__ import annotations

import re

from latex_answers.notation import closing_brace

_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_WRAPPER = re.compile(r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|mbox)\s*(?=\{)|(?=\{)")


def typeset_form(text: str) -> str:
    r"""Return the normal form of an answer in LaTeX. Two answers have the same normal form only if they print alike.

    ``\left( \dfrac{1}{2}, x^{2} \right)`` and ``(\frac{1}{2},x^2)`` have the same normal form. Math delimiters,
    commands around the whole text, a full stop at the end, and commands for size are removed. A space is removed unless
    there is a letter or digit on both sides. Braces are removed only around a single character after ``^`` or ``_``.
    """
    text = unwrapped(text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", "", text)
    text = re.sub(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"([\^_])\s*\{\s*([^\s{}\\])\s*\}", r"\1\2 ", text)
    text = re.sub(r"\s+", " ", text)
    # "5 .5" is not "5.5", and "1, 234" is two numbers.
    text = re.sub(r" (?=[^\w.])|(?<=[^\w.]) (?![0-9]{3}(?![0-9]))", "", text)
    return text.strip()


def unwrapped(text: str) -> str:
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
