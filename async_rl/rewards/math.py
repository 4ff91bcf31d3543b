"""Rewards for mathematics: extract the answer, compare it with the row's, punish over-long answers.

Enters one finished rollout, leaves its reward parts and accuracy. Built by ``registry``, called by the worker.
"""

from __future__ import annotations

from collections.abc import Callable

from async_rl.errors import RewardError
from async_rl.rewards.equality import answers_equal
from async_rl.rewards.extraction import Extraction
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.verifier import MathVerifier

OverlongPenalty = Callable[[RewardInput, float, bool], float]
"""Of a rollout, what it earned (a share of the scale) and whether it holds an answer: a share of the scale, <= 0."""


class MathReward:
    """``correct``: ``scale`` if the answer equals ``gt_answer`` and the format is valid, else 0.

    ``overlong``: what ``overlong`` says times ``scale``; absent if that is None. Accuracy looks at equality alone: a
    right answer in a wrong format has accuracy 1 and earns nothing.
    """

    def __init__(
        self,
        extract: Callable[[str], Extraction],
        *,
        scale: float,
        overlong: OverlongPenalty | None,
        time_limit_s: float,
        verifier: MathVerifier,
    ) -> None:
        self._extract = extract
        self._scale = scale
        self._overlong = overlong
        self._time_limit_s = time_limit_s
        self._verifier = verifier

    def __call__(self, item: RewardInput) -> RewardOutput:
        gold = item.reward_data.get("gt_answer")
        if isinstance(gold, bool) or not isinstance(gold, str | int | float):
            raise RewardError(
                f"expected reward data with a gt_answer (text or number), got keys {sorted(item.reward_data)}"
            )
        answer, format_valid = self._extract(item.text)
        equal = answer is not None and answers_equal(
            str(gold), answer, verifier=self._verifier, time_limit_s=self._time_limit_s
        )
        earned = 1.0 if equal and format_valid else 0.0
        parts = {"correct": self._scale * earned}
        if self._overlong is not None:
            parts["overlong"] = self._scale * self._overlong(item, earned, answer is not None)
        return RewardOutput(parts, 1.0 if equal else 0.0, answer)

    def counters(self) -> dict[str, int]:
        """``verifier_{requests,timed_out,crashed}``: a timed out or crashed comparison was scored as unequal."""
        return {f"verifier_{name}": count for name, count in self._verifier.counts.items()}

    def close(self) -> None:
        self._verifier.close()
