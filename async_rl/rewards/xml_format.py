"""DistRL-LLM's reward for the form of a reply, corrected where it contradicts itself. Pure; built by ``registry``.

The form is ``<think>``, thoughts, ``</think>``, ``<answer>``, the answer, ``</answer>``, each tag on a line of its own.
"""

from __future__ import annotations

import re

from async_rl.rewards.records import RewardInput, RewardOutput

STRUCTURE_POINTS = 0.1
TAG_POINTS = 0.05
PENALTY_A_CHARACTER = 0.001

_STRUCTURE = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_END = "</answer>"


def xml_format_points(text: str) -> float:
    """0.3 for the whole form; less for parts of it, and for what comes after it.

    0.1 if the text begins with thoughts and an answer between their tags; 0.05 for each tag, with its line breaks, that
    occurs exactly once. For each of the last two tags that earns its points, every character after the end of the
    answer (a line break excepted) costs 0.001.

    Two departures from the original, which would teach the wrong thing: there thoughts of more than one line earned no
    0.1, and a reply that ended at ``</answer>`` without a line break was charged for its whole length.
    """
    points = STRUCTURE_POINTS if _STRUCTURE.match(text) else 0.0
    earned = [text.count(tag) == 1 for tag in _TAGS]
    points += TAG_POINTS * sum(earned)
    tail = text[text.rfind(_END) + len(_END) :].removeprefix("\n") if _END in text else ""
    return points - PENALTY_A_CHARACTER * len(tail) * sum(earned[2:])


class XmlFormatReward:
    """``xml_format``: ``scale`` times the points. Accuracy is 1 for the whole form, else 0."""

    def __init__(self, *, scale: float) -> None:
        self._scale = scale

    def __call__(self, item: RewardInput) -> RewardOutput:
        points = xml_format_points(item.text)
        is_whole = points >= STRUCTURE_POINTS + len(_TAGS) * TAG_POINTS - PENALTY_A_CHARACTER / 2
        return RewardOutput({"xml_format": self._scale * points}, 1.0 if is_whole else 0.0)

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...
