"""Extracts the answer from a text: the last box, or the last answer tag. Pure, linear in the text's length."""

from __future__ import annotations

from typing import NamedTuple

_BOX = "\\boxed{"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Extraction(NamedTuple):
    """``answer`` is None if there is none; ``format_valid`` decides whether a right answer is rewarded in training."""

    answer: str | None
    format_valid: bool


def extract_boxed(text: str) -> Extraction:
    r"""The content of the last ``\boxed{...}``, stripped; the format is valid if it is there, closed and not blank.

    Only the last one counts: a box that was opened and never closed (a cut answer) is no answer, even if an earlier
    box was complete. ``\{`` and ``\}`` are LaTeX's printed braces and don't count as braces.
    """
    start = text.rfind(_BOX)
    end = None if start < 0 else closing_brace(text, start + len(_BOX) - 1)
    if end is None:
        return Extraction(None, False)
    answer = text[start + len(_BOX) : end].strip()
    return Extraction(answer or None, bool(answer))


def extract_answer_tag(text: str) -> Extraction:
    """The content of the last ``<answer>...</answer>``, stripped.

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
    """Return the text from the last ``<answer>`` to the next ``</answer>``, stripped; the whole text without tags.

    The format is valid if there is any answer.
    """
    answer = text.rpartition(_TAGS[2])[2].partition(_TAGS[3])[0].strip()
    return Extraction(answer or None, bool(answer))


def closing_brace(text: str, opening: int) -> int | None:
    """Return the index of the brace that closes the one at ``opening``; None if it is never closed."""
    depth = 0
    position = opening
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # skips the escaped character
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None
