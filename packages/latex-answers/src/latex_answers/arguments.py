r"""Writes the braces that ``reading`` needs around the arguments of commands. ``equality`` calls it.

TeX takes the next character or group as an argument: ``\frac12`` is a half.
"""

from __future__ import annotations

import re

from latex_answers.notation import closing_brace

_SIZES = re.compile(r"\\(left|right|big|Big|bigg|Bigg)([lrm]?)(?![A-Za-z])\s*")
_FRAC = re.compile(r"\\(?:(?:[dtcs]|nice)?(?P<name>frac)|[dt]?(?P<other>binom))(?![A-Za-z])\s*")
_ROOT = re.compile(r"\\sqrt(?![A-Za-z])\s*(?P<index>\[[^\[\]{}]*\])?\s*(?=[0-9A-Za-z])")
_SCRIPT = re.compile(r"\^\s*(?=\\(?:[dt]?frac|binom)(?![A-Za-z]))")
_COMMAND = re.compile(r"\\[A-Za-z]+")


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
