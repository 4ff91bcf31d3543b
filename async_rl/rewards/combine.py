"""Several rewards as one: the main one, others added with weights, then the penalty for over-long answers.

Built by ``registry``; what the worker calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from async_rl.rewards.overlong import OverlongPenalty
from async_rl.rewards.records import GroupReward, Reward, RewardInput, RewardOutput, score_group


class Extra(NamedTuple):
    """A further reward. Its parts are summed, times ``weight``, to one part called ``name``; accuracy is ignored."""

    name: str
    reward: Reward
    weight: float


class RewardSum:
    """``main``'s parts, one part for every extra, and ``overlong``: the penalty times ``scale``.

    Accuracy and the extracted answer are ``main``'s. Without ``overlong`` there is no such part.
    """

    def __init__(
        self, main: Reward, extras: Sequence[Extra] = (), *, scale: float, overlong: OverlongPenalty | None
    ) -> None:
        self._main, self._extras = main, tuple(extras)
        self._rewards = (main, *(extra.reward for extra in extras))
        self._scale, self._overlong = scale, overlong

    @property
    def needs_whole_group(self) -> bool:
        return any(isinstance(reward, GroupReward) and reward.needs_whole_group for reward in self._rewards)

    @property
    def is_async(self) -> bool:
        return any(isinstance(reward, GroupReward) and reward.is_async for reward in self._rewards)

    def __call__(self, item: RewardInput) -> RewardOutput:
        return self.score_group([item])[0]

    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        outputs = score_group(self._main, items)
        parts = [dict(output.parts) for output in outputs]
        for extra in self._extras:
            for sums, output in zip(parts, score_group(extra.reward, items), strict=True):
                sums[extra.name] = extra.weight * sum(output.parts.values())
        if self._overlong is not None:
            for item, output, sums in zip(items, outputs, parts, strict=True):
                earned = sum(sums.values()) / self._scale
                has_answer = output.extracted is not None if output.has_answer is None else output.has_answer
                sums["overlong"] = self._scale * self._overlong(item, earned, has_answer)
        return [RewardOutput(sums, o.accuracy, o.extracted) for sums, o in zip(parts, outputs, strict=True)]

    def counters(self) -> dict[str, int]:
        """Those of every reward; where two count the same, their sum."""
        total: dict[str, int] = {}
        for reward in self._rewards:
            for name, count in reward.counters().items():
                total[name] = total.get(name, 0) + count
        return total

    def close(self) -> None:
        for reward in self._rewards:
            reward.close()
