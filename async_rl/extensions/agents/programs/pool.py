"""The pool of processes that run agents, by what plays: the user's code, ``environment.command`` or a taskset."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.config.config import Config
from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool
from async_rl.process.user_code import check_allowed_command, digest_of

_COMMAND = "async_rl.extensions.agents.programs.command"
_TASKSET = "async_rl.extensions.agents.programs.verifiers_agent"


def agent_pool(config: Config, code_digests: Mapping[str, str] | None = None) -> EnvironmentPool:
    """Start the processes of the config's agent.

    ``code_digests`` are the learner's digests of the user's own code. None: this machine's user chose the code.

    Raises:
        ConfigError: what plays is not allowed here, is missing, differs from the learner's, or fails when it is
            imported or prepared.
    """
    environment, allowed = config.environment, config.generator.allow_code
    if environment.user_code:
        digest = digest_of(environment.user_code, code_digests)
        return EnvironmentPool(environment, allowed=allowed, digest=digest, has_agents=True)
    check_allowed_command(environment.program, allowed, key=environment.program_key)
    return program_pool(environment)


def program_pool(config: EnvironmentConfig) -> EnvironmentPool:
    """Start the processes of ``environment.command`` or of a taskset. This machine's user has allowed the program."""
    if not config.taskset:
        return EnvironmentPool(config, code=f"{_COMMAND}:run", allowed=[_COMMAND], digest=None, has_agents=True)
    settings = {"python": config.python, "taskset": config.taskset, "extra": config.extra}
    return EnvironmentPool(
        config, code=f"{_TASKSET}:Taskset", settings=settings, allowed=[_TASKSET], digest=None, has_agents=True
    )
