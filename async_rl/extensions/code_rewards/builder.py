"""Builds the reward ``code`` from the config."""

from __future__ import annotations

from async_rl.config.config import Config
from async_rl.extensions.code_rewards.reward import CodeReward, LocalJudge, sandbox_of
from async_rl.extensions.code_rewards.verifier import RemoteJudge


def code_reward(config: Config, scale: float) -> CodeReward:
    """Build the reward for programs. Start the sandbox, or check the verifier at ``reward.code.endpoint``.

    Raises:
        SandboxError: the sandbox or the verifier does not work. The message says what to do.
    """
    code = config.reward.code
    return CodeReward(
        RemoteJudge(code) if code.endpoint is not None else LocalJudge(sandbox_of(code), code),
        scale=scale,
        partial_credit=code.partial_credit,
        num_workers=code.num_workers,
    )
