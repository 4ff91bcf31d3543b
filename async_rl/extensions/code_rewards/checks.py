"""The check of a machine that shall run programs."""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.extensions.code_rewards.builder import code_reward
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.start import Start


def check_sandbox(start: Start) -> Iterator[Finding]:
    """Check that this machine can isolate programs, or that the configured verifier answers.

    Raises:
        SandboxError: the check failed, and ``reward.code.allow_unsafe`` is false.
    """
    code_reward(start.config, 1.0).close()
    code = start.config.reward.code
    if code.endpoint is not None:
        yield Finding("sandbox", "OK", f"the verifier at {code.endpoint} judges programs")
    elif code.allow_unsafe:
        fix = "set reward.code.allow_unsafe = false to make sure that programs are isolated"
        yield Finding("sandbox", "WARN", "programs run without a sandbox if this machine can't isolate them", fix=fix)
    else:
        yield Finding("sandbox", "OK", "programs run isolated")
