"""Rewards for answers that are known: extract the answer, compare it with the row's.

Enters one finished rollout, leaves its reward parts and accuracy. Built by ``registry``, called by the worker.
"""

from __future__ import annotations

from collections.abc import Callable

from async_rl.errors import RewardError
from async_rl.rewards.equality import answers_equal
from async_rl.rewards.extraction import Extraction
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.verifier import MathVerifier

Equality = Callable[[str, str], bool]
"""Whether the row's answer and a given one are the same."""


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
        """``verifier`` is what ``equal`` asks, if it asks one; it is closed with this reward."""
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
                f"expected reward data with a gt_answer (text or number), got keys {sorted(item.reward_data)}"
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
    """Character by character, but for space around the whole."""
    return gold.strip() == answer.strip()
