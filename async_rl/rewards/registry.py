"""The reward types: ``reward.type`` to what computes it. An explicit table; nothing registers itself.

``boxed`` and ``think_answer_tags`` differ only in where the answer is; see docs/rewards.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from async_rl.config import Config
from async_rl.rewards.code import build_code_reward
from async_rl.rewards.extraction import Extraction, extract_answer_tag, extract_boxed
from async_rl.rewards.math import MathReward, OverlongPenalty
from async_rl.rewards.overlong import dapo_penalty, zero_at_limit_penalty
from async_rl.rewards.records import Reward, RewardInput, RewardOutput
from async_rl.rewards.verifier import MathVerifier

__all__ = ["Reward", "RewardInput", "RewardOutput", "build_reward"]

_EXTRACTORS: Mapping[str, Callable[[str], Extraction]] = {
    "boxed": extract_boxed,
    "think_answer_tags": extract_answer_tag,
}


def build_reward(config: Config) -> Reward:
    """The reward function that ``config`` asks for; close it. Its processes start when first needed, a sandbox at once.

    Raises:
        SandboxError: code is to be graded, and this machine can't.
    """
    if config.reward.type == "code":
        return build_code_reward(config, _overlong_penalty(config))
    return MathReward(
        _EXTRACTORS[config.reward.type],
        scale=config.reward.scale,
        overlong=_overlong_penalty(config),
        time_limit_s=config.reward.time_limit_s,
        verifier=MathVerifier(),
    )


def _overlong_penalty(config: Config) -> OverlongPenalty | None:
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
