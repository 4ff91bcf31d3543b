"""Rewards for mathematics: extract the answer, compare it with the row's, punish over-long answers.

Enters one finished rollout, leaves its reward parts and accuracy. Built by ``registry``, called by the worker.
"""

from __future__ import annotations

from collections.abc import Callable

from async_rl.errors import RewardError
from async_rl.rewards.equality import answers_equal
from async_rl.rewards.extraction import Extraction
from async_rl.rewards.overlong import overlong_penalty
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.verifier import MathVerifier


class MathReward:
    """``correct``: ``scale`` if the answer equals ``gt_answer`` and the format is valid, else 0.

    ``overlong``: DAPO's punishment times ``scale``; absent if ``cache_length`` is None. Accuracy looks at equality
    alone: a right answer in a wrong format has accuracy 1 and earns nothing.
    """

    def __init__(
        self,
        extract: Callable[[str], Extraction],
        *,
        scale: float,
        cache_length: int | None,
        time_limit_s: float,
        verifier: MathVerifier,
    ) -> None:
        self._extract = extract
        self._scale = scale
        self._cache_length = cache_length
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
        parts = {"correct": self._scale if equal and format_valid else 0.0}
        if self._cache_length is not None:
            parts["overlong"] = self._scale * overlong_penalty(
                item.num_tokens,
                max_new_tokens=item.max_new_tokens,
                cache_length=self._cache_length,
                truncated=item.finish_reason == "length",
            )
        return RewardOutput(parts, 1.0 if equal else 0.0, answer)

    def counters(self) -> dict[str, int]:
        """``verifier_{requests,timed_out,crashed}``: a timed out or crashed comparison was scored as unequal."""
        return {f"verifier_{name}": count for name, count in self._verifier.counts.items()}

    def close(self) -> None:
        self._verifier.close()
