r"""Extracts the answer from a model's text: the content of the last ``\boxed{}`` or of the last ``<answer>`` tag.

The time is linear in the length of the text, so a hostile text can't slow a generator down.
"""

from __future__ import annotations

from typing import NamedTuple

from latex_answers import boxed_answer

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Extraction(NamedTuple):
    """The answer that was extracted from a model's text. ``answer`` is None if the text has no answer.

    ``format_valid`` says whether the text has the required format. A reward may pay only for answers in this format.
    """

    answer: str | None
    format_valid: bool


def extract_boxed(text: str) -> Extraction:
    r"""Return the content of the last ``\boxed{...}`` in ``text``. The format is valid if there is one."""
    answer = boxed_answer(text)
    return Extraction(answer, answer is not None)


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
