"""What an answer loses for its length: DAPO's equation 13 (arXiv:2503.14476), and Colossal-RL's variant of it. Pure.

``registry`` builds the penalty that the config asks for; ``combine`` adds it to a rollout's parts. L is
``max_new_tokens``, C is ``cache_length``.
"""

from __future__ import annotations

from collections.abc import Callable

from async_rl.config.config import Config
from async_rl.rewards.records import RewardInput

OverlongPenalty = Callable[[RewardInput, float, bool], float]
"""From a rollout, what it earned (a share of the scale) and whether it has an answer, to a share of the scale, <= 0."""


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
