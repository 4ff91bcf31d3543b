"""Builds the rewards that ``[reward]`` names, from an explicit table. Called by generators, evaluation and preflight.

A name of the form ``module:function`` is the user's own code (``functions``, ``process.user_code``). See
docs/rewards.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from async_rl.config.config import Config
from async_rl.config.reward import REWARD_TYPES
from async_rl.config.section import look_up
from async_rl.process.user_code import digest_of, is_code_name, load_code
from async_rl.rewards.answers import AnswerReward, XmlFormatReward, same_mathematics, same_text
from async_rl.rewards.code import CodeReward, local_judge
from async_rl.rewards.code_remote import RemoteJudge
from async_rl.rewards.combine import Extra, RewardSum, overlong_penalty
from async_rl.rewards.extraction import Extraction, extract_answer_tag, extract_boxed, extract_xml_answer
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.records import Reward
from async_rl.rewards.verifier import MathVerifier

Builder = Callable[[Config, float], Reward]
"""From the config and ``reward.scale`` to the reward."""


def build_reward(config: Config, *, code_digests: Mapping[str, str] | None = None) -> RewardSum:
    """Build the reward that ``config`` asks for; close it. Its processes start when first needed, a sandbox at once.

    Args:
        code_digests: the learner's digests of the user's own code; if unset, this machine's code is not compared.

    Raises:
        ConfigError: code that is not allowed here, not there, not the learner's, or not a reward function.
        SandboxError: programs are to be graded, and this machine can't.
    """
    main = _named(config.reward.type, config, config.reward.scale, code_digests, is_main=True)
    extras = [
        Extra(name.rpartition(":")[2], _named(name, config, 1.0, code_digests, is_main=False), weight)
        for name, weight in config.reward.extra.items()
    ]
    return RewardSum(main, extras, scale=config.reward.scale, overlong=overlong_penalty(config))


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
    )


def _answer_reward(name: str, extract: Callable[[str], Extraction]) -> Builder:
    """The builder of the reward ``name``, which compares what ``extract`` finds with the row's answer."""

    def build(config: Config, scale: float) -> AnswerReward:
        is_mathematics = REWARD_TYPES[name].compares_mathematics and config.reward.equality == "math"
        verifier = MathVerifier() if is_mathematics else None
        return AnswerReward(
            extract,
            same_text if verifier is None else same_mathematics(verifier, config.reward.time_limit_s),
            scale=scale,
            require_format=config.reward.require_format,
            format_reward=config.reward.format,
            verifier=verifier,
        )

    return build


def _code_reward(config: Config, scale: float) -> CodeReward:
    """The reward for programs, its sandbox running, or its verifier found to work.

    Raises:
        SandboxError: neither works; the message says what to do.
    """
    code = config.reward.code
    return CodeReward(
        RemoteJudge(code) if code.endpoint is not None else local_judge(code),
        scale=scale,
        partial_credit=code.partial_credit,
        num_workers=code.num_workers,
    )


REWARDS: Mapping[str, Builder] = {
    "boxed": _answer_reward("boxed", extract_boxed),
    "think_answer_tags": _answer_reward("think_answer_tags", extract_answer_tag),
    "exact": _answer_reward("exact", extract_xml_answer),
    "xml_format": lambda config, scale: XmlFormatReward(scale=scale),
    "code": _code_reward,
}
"""How each reward is built. ``config.reward.REWARD_TYPES`` has the same names."""
