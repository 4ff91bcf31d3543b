"""Rewards for rows with a known answer and for the form of a reply, and the majority vote over several answers.

A reward's input is one finished rollout, and its output is the reward parts and the accuracy. ``registry`` builds the
rewards, and generators' workers call them. Evaluations use the vote.

``XmlFormatReward`` is DistRL-LLM's reward, corrected where the original contradicts itself. The form is ``<think>``,
thoughts, ``</think>``, ``<answer>``, the answer, ``</answer>``, with each tag on a separate line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from async_rl.config.config import Config
from async_rl.config.reward import reward_type
from async_rl.errors import RewardError
from async_rl.rewards.extraction import Extraction
from async_rl.rewards.gold import gold_readings
from async_rl.rewards.math.verifier import MathVerifier, Verdict
from async_rl.rewards.records import RewardInput, RewardOutput
from latex_answers import canonical_form, compare_by

Equality = Callable[[str, str], bool]
"""A function of the row's answer and the model's answer. It returns whether they are equal."""

STRUCTURE_POINTS = 0.1
TAG_POINTS = 0.05
PENALTY_A_CHARACTER = 0.001

_START = "<think>"
_BETWEEN = re.compile(r"</think>\s*+<answer>")
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_END = "</answer>"

VoteKey = Callable[[str], Hashable]
"""A function that returns the vote key of an extracted answer. Answers with the same key count as the same vote."""


class AnswerReward:
    """Compares the answer in the model's text with the row's ``gt_answer``, as ``gold`` reads it.

    The reward part ``correct`` is ``scale`` if the answers are equal and the format is valid, else 0. Without
    ``require_format``, equal answers are enough. The part ``format`` is ``format_reward`` if the format is valid, else
    0, for right and wrong answers. It is absent if ``format_reward`` is 0. The accuracy is 1 if the answers are equal,
    in any format. The format is also valid if it is with what the prompt has opened (``RewardInput.prompt_opened``).
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
        """Store the settings. ``extract`` finds the answer in a text. ``equal`` compares it with the row's answer.

        ``verifier`` is the MathVerifier that ``equal`` uses, or None. It is closed together with this reward.
        """
        self._extract = extract
        self._equal = equal
        self._scale = scale
        self._require_format = require_format
        self._format_reward = format_reward
        self._verifier = verifier

    def __call__(self, item: RewardInput) -> RewardOutput:
        gold = item.reward_data.get("gt_answer")
        golds = gold_readings(item.reward_data, is_mathematics=self._verifier is not None)
        if not golds and not isinstance(gold, str):  # the loader refuses text that says nothing; no answer equals it
            raise RewardError(
                f"can't score an answer: expected text or a number as the row's gt_answer, got {gold!r:.80} in a row "
                f"with the keys {sorted(item.reward_data)}; correct the row, or name its column in [data.columns]"
            )
        answer, format_valid = self._extract(item.text)
        if not format_valid and item.prompt_opened:
            answer, format_valid = self._extract(item.prompt_opened + item.text)
        equal = answer is not None and any(self._equal(one, answer) for one in golds)
        earns = equal and (format_valid or not self._require_format)
        parts = {"correct": self._scale if earns else 0.0}
        if self._format_reward:
            parts["format"] = self._format_reward if format_valid else 0.0
        return RewardOutput(parts, 1.0 if equal else 0.0, answer)

    def counters(self) -> dict[str, int]:
        """Return the verifier's counts of comparisons, as ``verifier_requests``, ``verifier_timed_out`` and so on.

        A comparison that sympy gave up (``verifier_not_computed``), that timed out or crashed was scored as unequal.
        Without a verifier the result is empty.
        """
        counts = {} if self._verifier is None else self._verifier.counts
        return {f"verifier_{name}": count for name, count in counts.items()}

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()


def same_mathematics(verifier: MathVerifier, time_limit_s: float) -> Equality:
    """Return the function that compares two answers as mathematics (``latex_answers.equal``).

    What needs the reader is left to ``verifier``. It is unequal if that is not computed, times out or crashes, and
    ``verifier`` counts these. ``time_limit_s`` is the verifier's limit of processor time for one comparison.
    """

    def read(answer: str, gold: str) -> Verdict:
        return verifier.ask(gold, answer, time_limit_s)

    return lambda gold, answer: compare_by(read, answer, gold) == "equal"


def same_text(gold: str, answer: str) -> bool:
    """Return whether two texts are equal, apart from white space at both ends."""
    return gold.strip() == answer.strip()


def xml_format_points(text: str) -> float:
    """Return the points of a text for DistRL-LLM's form: 0.3 for the complete form, less if parts are missing.

    The text earns 0.1 if it begins with thoughts and an answer between their tags. It earns 0.05 for each of the four
    tags that occurs exactly once with its line breaks. Every character after ``</answer>``, except one line break,
    costs 0.001 for each of the last two tags that earned points.

    Two rules of the original are changed. There, thoughts of several lines did not earn the 0.1, and a reply that ended
    at ``</answer>`` without a line break lost points for its whole length.
    """
    points = STRUCTURE_POINTS if _has_structure(text) else 0.0
    earned = [text.count(tag) == 1 for tag in _TAGS]
    points += TAG_POINTS * sum(earned)
    tail = text[text.rfind(_END) + len(_END) :].removeprefix("\n") if _END in text else ""
    return points - PENALTY_A_CHARACTER * len(tail) * sum(earned[2:])


def _has_structure(text: str) -> bool:
    """Return whether ``text`` begins with ``<think>...</think>``, white space and ``<answer>...</answer>``.

    Only the first end of thoughts before an answer counts, so that the time is linear: if no ``</answer>`` follows it,
    none follows a later one.
    """
    between = _BETWEEN.search(text, len(_START)) if text.startswith(_START) else None
    return between is not None and text.find(_END, between.end()) >= 0


class XmlFormatReward:
    """Rewards the form of a reply. The part ``xml_format`` is ``scale`` times ``xml_format_points``.

    The accuracy is 1 for the complete form, else 0. The answer is not compared with the row. What the prompt has opened
    counts, unless the text alone earns more.
    """

    def __init__(self, *, scale: float) -> None:
        self._scale = scale

    def __call__(self, item: RewardInput) -> RewardOutput:
        points = max(xml_format_points(item.text), xml_format_points(item.prompt_opened + item.text))
        is_whole = points >= STRUCTURE_POINTS + len(_TAGS) * TAG_POINTS - PENALTY_A_CHARACTER / 2
        return RewardOutput({"xml_format": self._scale * points}, 1.0 if is_whole else 0.0)

    def close(self) -> None: ...


def vote_key_of(config: Config) -> VoteKey | None:
    """Return the function that computes the vote key of an answer. None if the answers are programs.

    If the run's reward compares answers as mathematics, answers that are equal without the verifier have the same key:
    ``1/2`` and ``0.50`` do, ``x+1`` and ``1+x`` do not. Otherwise the key is the text without white space at both ends.
    """
    judge = reward_type(config.reward.right_by)
    if judge.runs_programs:
        return None
    is_mathematics = judge.compares_mathematics and config.reward.equality == "math"
    return canonical_form if is_mathematics else str.strip


def majority(answers: Sequence[str | None], vote_key: VoteKey) -> int | None:
    """Return the index of the first answer with the most common vote key. None if all answers are None.

    ``answers`` has one entry for each rollout of a group, None for a rollout without an answer. Such a rollout does not
    vote. If two keys have equally many votes, the key that occurs first wins.
    """
    keys = [None if answer is None else (vote_key(answer),) for answer in answers]
    votes = Counter(key for key in keys if key is not None)
    if not votes:
        return None
    most = max(votes.values())
    return next(index for index, key in enumerate(keys) if key is not None and votes[key] == most)
