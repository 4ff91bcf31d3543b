"""Several rewards as one: the main one, others added with weights, then the penalty for over-long answers.

``registry`` builds it; the worker calls it. The penalty is DAPO's equation 13 (arXiv:2503.14476) or Colossal-RL's
variant of it. There L is ``max_new_tokens``, and C is ``cache_length``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from async_rl.config.config import Config
from async_rl.rewards.records import GroupReward, Reward, RewardInput, RewardOutput, score_group

OverlongPenalty = Callable[[RewardInput, float, bool], float]
"""From a rollout, what it earned (a share of the scale) and whether it has an answer, to a share of the scale, <= 0."""


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


def overlong_penalty(config: Config) -> OverlongPenalty | None:
    """The penalty that ``reward.overlong`` and ``reward.soft_overlong`` ask for; None for none."""
    cache_length = config.cache_length if config.reward.soft_overlong else None

    def dapo(item: RewardInput, earned: float, has_answer: bool) -> float:
        return dapo_penalty(
            item.num_tokens,
            max_new_tokens=item.max_new_tokens,
            cache_length=config.cache_length,
            truncated=item.finish_reason == "length",
        )

    def zero_at_limit(item: RewardInput, earned: float, has_answer: bool) -> float:
        return zero_at_limit_penalty(
            item.num_tokens,
            max_new_tokens=item.max_new_tokens,
            cache_length=cache_length,
            truncated=item.finish_reason == "length",
            earned=earned,
            has_answer=has_answer,
        )

    if config.reward.overlong == "zero_at_limit":
        return zero_at_limit
    return dapo if config.reward.soft_overlong else None


def dapo_penalty(num_tokens: int, *, max_new_tokens: int, cache_length: int, truncated: bool) -> float:
    """DAPO's penalty as a share of the reward's scale, in [-1, 0].

    0 up to L - C tokens; then linear, ``((L - C) - n) / C``; -1 from L on. An answer that was cut before L (by a
    context limit) gets -1 too.

    Args:
        num_tokens: n, sampled tokens.
        max_new_tokens: L, at least 1.
        cache_length: C, at least 1.
        truncated: the answer was cut.

    Raises:
        ValueError: L or C is below 1, or n below 0.
    """
    if max_new_tokens < 1 or cache_length < 1 or num_tokens < 0:
        raise ValueError(
            f"expected max_new_tokens >= 1, cache_length >= 1 and num_tokens >= 0, got {max_new_tokens}, "
            f"{cache_length} and {num_tokens}"
        )
    if truncated or num_tokens >= max_new_tokens:
        return -1.0
    free_length = max_new_tokens - cache_length
    return min(0.0, (free_length - num_tokens) / cache_length)


def zero_at_limit_penalty(
    num_tokens: int,
    *,
    max_new_tokens: int,
    cache_length: int | None,
    truncated: bool,
    earned: float,
    has_answer: bool,
) -> float:
    """Colossal-RL's penalty: the same line, but from L on the whole reward becomes 0.

    Between L - C and L the penalty applies only to texts with an answer, right or wrong. So a wrong answer there gets
    less than one that was never finished.

    Args:
        cache_length: None leaves the line out; the reward is still 0 from L on.
        earned: the reward without this, as a share of the scale.
        has_answer: an answer was found in the text.

    Returns:
        A share of the scale: ``-earned`` from L on (and where it was cut), else in (-1, 0].
    """
    if truncated or num_tokens >= max_new_tokens:
        return 0.0 - earned  # not -0.0
    if cache_length is None or not has_answer:
        return 0.0
    return dapo_penalty(num_tokens, max_new_tokens=max_new_tokens, cache_length=cache_length, truncated=False)
