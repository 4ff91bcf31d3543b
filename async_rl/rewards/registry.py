"""The rewards by name, and what ``[reward]`` asks for built from them. An explicit table; nothing registers itself.

See docs/rewards.md. A name of the form ``module:function`` is the user's own code: ``functions`` and ``local_code``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from async_rl.config.config import Config
from async_rl.config.section import look_up
from async_rl.process.user_code import digest_of, is_code_name, load_code
from async_rl.rewards.code import build_code_reward
from async_rl.rewards.combine import Extra, OverlongPenalty, RewardSum
from async_rl.rewards.extraction import Extraction, extract_answer_tag, extract_boxed, extract_xml_answer
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.math import AnswerReward, same_mathematics, same_text
from async_rl.rewards.overlong import dapo_penalty, zero_at_limit_penalty
from async_rl.rewards.records import Reward, RewardInput, RewardOutput
from async_rl.rewards.verifier import MathVerifier
from async_rl.rewards.xml_format import XmlFormatReward

__all__ = ["REWARDS", "Reward", "RewardInput", "RewardOutput", "build_reward"]


def build_reward(config: Config, *, code_digests: Mapping[str, str] | None = None) -> RewardSum:
    """The reward function that ``config`` asks for; close it. Its processes start when first needed, a sandbox at once.

    Args:
        code_digests: of the user's own code, what the learner's machine has; none: this machine is the user's.

    Raises:
        ConfigError: code that is not allowed here, not there, not the learner's, or not a reward function.
        SandboxError: programs are to be graded, and this machine can't.
    """
    main = _named(config.reward.type, config, config.reward.scale, code_digests, is_main=True)
    extras = [
        Extra(name.rpartition(":")[2], _named(name, config, 1.0, code_digests, is_main=False), weight)
        for name, weight in config.reward.extra.items()
    ]
    return RewardSum(main, extras, scale=config.reward.scale, overlong=_overlong_penalty(config))


def _named(name: str, config: Config, scale: float, code_digests: Mapping[str, str] | None, *, is_main: bool) -> Reward:
    if not is_code_name(name):
        return look_up(REWARDS, name, "reward.type")(config, scale)
    function = load_code(name, allowed=config.generator.allow_code, digest=digest_of(name, code_digests))
    return FunctionReward(
        name,
        function,
        scale=scale,
        is_main=is_main,
        time_limit_s=config.reward.time_limit_s,
        max_concurrent=config.reward.max_concurrent,
    )


def _answer_reward(extract: Callable[[str], Extraction], config: Config, scale: float) -> AnswerReward:
    verifier = MathVerifier() if config.reward.equality == "math" else None
    return AnswerReward(
        extract,
        same_text if verifier is None else same_mathematics(verifier, config.reward.time_limit_s),
        scale=scale,
        require_format=config.reward.require_format,
        format_reward=config.reward.format,
        verifier=verifier,
    )


def _exact(config: Config, scale: float) -> AnswerReward:
    return AnswerReward(
        extract_xml_answer,
        same_text,
        scale=scale,
        require_format=config.reward.require_format,
        format_reward=config.reward.format,
    )


REWARDS: Mapping[str, Callable[[Config, float], Reward]] = {
    "boxed": lambda config, scale: _answer_reward(extract_boxed, config, scale),
    "think_answer_tags": lambda config, scale: _answer_reward(extract_answer_tag, config, scale),
    "exact": _exact,
    "xml_format": lambda config, scale: XmlFormatReward(scale=scale),
    "code": build_code_reward,
}
"""Name -> how the reward is built from the config and its scale. ``config.reward_types`` has the same names."""


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
