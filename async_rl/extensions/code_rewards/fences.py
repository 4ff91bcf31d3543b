"""Finds the program in a model's text: the content of a Markdown code fence whose language is Python.

It reads the text with regular expressions only, in linear time. A parser of Python in the generator's process could be
crashed by a hostile text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from async_rl.rewards.extraction import Extraction

_ATTRIBUTES = (
    r"(?:[ \t]*+(?:\{[^{}\n]*+\}|[\w-]++=(?:\"[^\"\n]*+\"|'[^'\n]*+'))(?=[ \t]*+(?:\r?\n|\{|[\w-]++=[\"'])))*+"
)
"""What may follow the language on its line: ``{.numberLines}``, ``title="a.py"``."""
_OPENING = re.compile(
    rf"(?<![`~])(?P<fence>`{{3,}}|~{{3,}})[ \t]*(?:python3?|py3?)(?![\w+#.-]){_ATTRIBUTES}", re.IGNORECASE
)
_DEFINED = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_BOUND = re.compile(r"\b(?:def|class)[ \t]+(\w+)|(?<![\w.])(\w+)[ \t]*=(?!=)")
_CALLED = re.compile(r"(?<![\w.])(\w+)[ \t]*\(")
_NOT_CODE = re.compile(
    r"'{3}.*?(?:'{3}|\Z)|\"{3}.*?(?:\"{3}|\Z)|'(?:[^'\\\n]|\\[^\n])*+'?|\"(?:[^\"\\\n]|\\[^\n])*+\"?|#[^\n]*", re.DOTALL
)
"""Strings and comments. A string that is never closed ends with its line, so that each character is read once."""


def extract_program(text: str, function: str | None = None) -> Extraction:
    """Return the program in the model's text. The format is valid if the program is in a fence such as "```python".

    The language may also be ``py``, ``python3`` or ``py3``, in any case, and the fence may be indented or unclosed.
    Of several fences the last one is the program, unless it is only an example of how to use an earlier one. Without
    such a fence the program is the whole text, and the format is invalid.

    Args:
        text: what the model wrote.
        function: the function that tests call. If a fence defines it, the last one that does is the program. None for a
            script.
    """
    programs = list(_fenced(text))
    if not programs:
        return Extraction(text, False)
    return Extraction(_chosen(programs, function), True)


def _fenced(text: str) -> Iterator[str]:
    """Yield the contents of the fences in ``text``, in order."""
    opening = _OPENING.search(text)
    unclosed: dict[str, int] = {}  # mark -> the shortest fence of it that nothing closes from here on
    while opening is not None:
        mark, size = opening["fence"][0], len(opening["fence"])
        closing = None
        if size < unclosed.get(mark, size + 1):  # else a search for each of many openings would be quadratic
            # A fence inside a line, as in print("```"), is text of the program. It closes at an end of a line.
            bare = rf"(?<!{mark}){mark}{{{size},}}(?!{mark})"
            closing = re.compile(rf"^[ \t]*{bare}|{bare}[ \t]*$", re.MULTILINE).search(text, opening.end())
        if closing is None:
            unclosed[mark] = min(size, unclosed.get(mark, size))
        end = text.find(opening["fence"], opening.end()) if closing is None else closing.start()
        yield _without_indent(text[opening.end() : None if end < 0 else end])
        opening = None if end < 0 else _OPENING.search(text, end)


def _without_indent(program: str) -> str:
    """Remove the indentation that all lines share, as of a fence in a list. Other programs stay as they are."""
    return textwrap.dedent(program) if re.match(r"\s*\n[ \t]+\S", program) else program


def _chosen(programs: Sequence[str], function: str | None) -> str:
    if function is not None:
        defines = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{function}\b|^{function}[ \t]*=(?!=)", re.MULTILINE)
        if found := [program for program in programs if defines.search(program)]:
            return found[-1]
    known: set[str] = set()
    chosen = programs[0]
    for program in programs:
        bound = {name for pair in _BOUND.findall(program) for name in pair if name}
        called = set(_CALLED.findall(_NOT_CODE.sub("", program)))
        if not known & (called - bound):
            chosen = program
        known.update(_DEFINED.findall(program))
    return chosen
