"""Rewards for answers that are known and for the form of a reply; the majority vote over several answers.

One finished rollout enters, its reward parts and accuracy leave. ``registry`` builds the rewards; workers call them.
The figures of evaluations use the vote. ``XmlFormatReward`` is DistRL-LLM's, corrected where it contradicts itself: its
form is ``<think>``, thoughts, ``</think>``, ``<answer>``, the answer, ``</answer>``, each tag on a line of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from async_rl.config.config import Config
from async_rl.errors import RewardError
from async_rl.rewards.equality import answers_equal, canonical_form
from async_rl.rewards.extraction import Extraction
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.verifier import MathVerifier

Equality = Callable[[str, str], bool]
"""Whether the row's answer (first) and the model's answer are equal."""

STRUCTURE_POINTS = 0.1
TAG_POINTS = 0.05
PENALTY_A_CHARACTER = 0.001

_STRUCTURE = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_END = "</answer>"

VoteKey = Callable[[str], Hashable]
"""Maps an extracted answer to its key: answers with the same key vote together."""


class AnswerReward:
    """``correct``: ``scale`` if the answer equals ``gt_answer`` and the format is valid, else 0.

    Without ``require_format`` a right answer earns it in any format. ``format``: ``format_reward`` where the format is
    valid, whatever the answer; absent if that is 0. Accuracy looks at equality alone: a right answer in a wrong format
    has accuracy 1.
    """

    def __init__(
        self,
        extract: Callable[[str], Extraction],
        equal: Equality,
        *,
        scale: float,
        require_format: bool = True,
        format_reward: float = 0.0,
        verifier: MathVerifier | None = None,
    ) -> None:
        """``verifier`` is the one that ``equal`` uses, if any. It is closed with this reward."""
        self._extract = extract
        self._equal = equal
        self._scale = scale
        self._require_format = require_format
        self._format_reward = format_reward
        self._verifier = verifier

    def __call__(self, item: RewardInput) -> RewardOutput:
        gold = item.reward_data.get("gt_answer")
        if isinstance(gold, bool) or not isinstance(gold, str | int | float):
            raise RewardError(
                f"expected a row with a gt_answer that is text or a number, got {gold!r:.80} and the keys "
                f"{sorted(item.reward_data)}; correct the row, or set data.columns"
            )
        answer, format_valid = self._extract(item.text)
        equal = answer is not None and self._equal(str(gold), answer)
        earns = equal and (format_valid or not self._require_format)
        parts = {"correct": self._scale if earns else 0.0}
        if self._format_reward:
            parts["format"] = self._format_reward if format_valid else 0.0
        return RewardOutput(parts, 1.0 if equal else 0.0, answer)

    def counters(self) -> dict[str, int]:
        """``verifier_{requests,timed_out,crashed}``: a timed out or crashed comparison was scored as unequal."""
        counts = {} if self._verifier is None else self._verifier.counts
        return {f"verifier_{name}": count for name, count in counts.items()}

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()


def same_mathematics(verifier: MathVerifier, time_limit_s: float) -> Equality:
    """See ``equality.answers_equal``."""
    return lambda gold, answer: answers_equal(gold, answer, verifier=verifier, time_limit_s=time_limit_s)


def same_text(gold: str, answer: str) -> bool:
    """Compare two texts, ignoring white space at both ends."""
    return gold.strip() == answer.strip()


def xml_format_points(text: str) -> float:
    """Return 0.3 for the whole form, less for parts of the form or if text follows it.

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


def vote_key_of(config: Config) -> VoteKey | None:
    """Return the function that gives an answer's vote key; None for programs, which never vote.

    Where answers are compared as mathematics, those that are equal without the verifier (``equality``'s first two
    steps) vote together: ``1/2`` and ``0.50`` do, ``x+1`` and ``1+x`` don't. Else equal texts do, without the white
    space at both ends.
    """
    if config.reward.types[0].runs_programs:
        return None
    is_mathematics = config.reward.types[0].compares_mathematics and config.reward.equality == "math"
    return canonical_form if is_mathematics else str.strip


def majority(answers: Sequence[str | None], vote_key: VoteKey) -> int | None:
    """Return the index of the first answer with the most common key; None if no rollout has an answer.

    A rollout without an answer (None) has no vote. Of answers with equally many votes, the one given first wins.
    """
    keys = [None if answer is None else (vote_key(answer),) for answer in answers]
    votes = Counter(key for key in keys if key is not None)
    if not votes:
        return None
    most = max(votes.values())
    return next(index for index, key in enumerate(keys) if key is not None and votes[key] == most)
