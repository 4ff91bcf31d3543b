r"""Extracts the answer from a model's text: the content of the last ``\boxed{}`` or of the last ``<answer>`` tag.

Boxes with only signs, names and ``and`` or ``or`` between them are one answer of several values.

The time is linear in the length of the text, so a hostile text can't slow a generator down.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Extraction(NamedTuple):
    """The answer that was extracted from a model's text. ``answer`` is None if the text has no answer.

    ``format_valid`` says whether the text has the required format. A reward may pay only for answers in this format.
    """

    answer: str | None
    format_valid: bool


def extract_boxed(text: str) -> Extraction:
    r"""Return the stripped content of the last ``\boxed{...}`` in ``text``. The format is valid if there is one.

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
    return Extraction(", ".join(dict.fromkeys(reversed(answers))) or None, bool(answers))


def extract_answer_tag(text: str) -> Extraction:
    """Return the stripped content of the last ``<answer>...</answer>`` in ``text``.

    The format is valid if each of ``<think> </think> <answer> </answer>`` occurs exactly once, in this order, and the
    text ends with ``</answer>``. Any text may precede ``<think>``.
    """
    open_tag, close_tag = _TAGS[2], _TAGS[3]
    answer: str | None = None
    start = text.find(open_tag)
    while start >= 0:
        end = text.find(close_tag, start + len(open_tag))
        if end < 0:
            break
        answer = text[start + len(open_tag) : end].strip()
        start = text.find(open_tag, end + len(close_tag))
    places = [text.find(tag) for tag in _TAGS]
    in_order = all(text.count(tag) == 1 for tag in _TAGS) and places == sorted(places)
    return Extraction(answer or None, bool(answer) and in_order and text.endswith(close_tag))


def extract_xml_answer(text: str) -> Extraction:
    """Return the stripped text from the last ``<answer>`` to the next ``</answer>``. Without tags it is the whole text.

    The format is valid if the answer is not blank.
    """
    answer = text.rpartition(_TAGS[2])[2].partition(_TAGS[3])[0].strip()
    return Extraction(answer or None, bool(answer))
