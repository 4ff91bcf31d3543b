r"""Finds the answer in a model's text: the content of its last ``\boxed{}``.

The time is linear in the length of the text, so a hostile text can't slow a caller down.
"""

from __future__ import annotations

import re

from latex_answers.notation import closing_brace

_BOX = re.compile(r"\\(?P<name>boxed|f(?:rame)?box)(?![A-Za-z])(?:(?P<bare>-?[0-9]+(?:\.[0-9]+)?)|\s*\{)")
"""``\\boxed72`` is a box too: TeX takes one digit, but its author means all."""
_BRACED = r"[^{}]*+"
for _ in range(6):
    _BRACED = rf"(?:[^{{}}]|\{{{_BRACED}\}})*+"
_UNSEEN = re.compile(rf"\\(?:[hv]?phantom|[bx]?cancel|sout)\s*\{{{_BRACED}\}}")
"""What is not printed, or struck out, with the braces in it up to a depth of 6."""
_BETWEEN = re.compile(
    r"(?:[\s$,;/.()\[\]\u3001\uff0c\u548c\u6216]|\\[\s,;:()\[\]]|\\q?quad|\\text\s*\{\s*(?:and|or),?\s*\}"
    r"|\b(?:and|or|maybe|perhaps)\b|[A-Za-z](?:_(?:\w|\{\w+\}))?\s*=|\(?\b(?:[A-Za-z]|[0-9]{1,2}|[ivx]{1,3})[).:])*+"
)
"""What joins boxes to one answer. Any other text between two boxes begins a new one."""


def boxed_answer(text: str) -> str | None:
    r"""Return the stripped content of the last ``\boxed{...}`` in ``text``. None if it has no answer.

    Values in boxes that are joined (``\boxed{3}$ and $\boxed{5}``) are one list, without repetitions. Blank boxes, and
    boxes in ``\phantom{}`` and ``\cancel{}``, do not count. ``\fbox{}`` counts in a text without ``\boxed{}``.

    There is no answer if the last box is never closed, for example because the text was cut, even if an earlier box is
    complete. ``\{`` and ``\}`` are printed braces in LaTeX, so they neither open nor close the box.
    """
    text = _UNSEEN.sub(lambda unseen: "" if _BOX.search(unseen[0]) else unseen[0], text)
    found = list(_BOX.finditer(text))
    answers: list[str] = []
    after = len(text)  # the start of the box that follows
    for box in reversed([box for box in found if box["name"] == "boxed"] or found):
        end = box.end() if box["bare"] else closing_brace(text, box.end() - 1)
        if end is None or (answers and not (end <= after and _BETWEEN.fullmatch(text, end + (not box["bare"]), after))):
            break
        content = box["bare"] or text[box.end() : end].strip()
        if content:
            answers.append(content)
            after = box.start()
    return ", ".join(dict.fromkeys(reversed(answers))) or None
