"""The pool of processes that run agents, by what plays: the user's code, ``environment.command`` or a taskset."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from async_rl.config.config import Config
from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool, ForkedCode
from async_rl.extensions.agents.programs import isolation
from async_rl.process.user_code import check_allowed_command, digest_of

_SERVER = "async_rl.extensions.agents.programs.fork_server"
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
    if code := environment.user_code:
        return code_pool(environment, allowed, digest_of(code, code_digests))
    check_allowed_command(environment.program, allowed, key=environment.program_key)
    return program_pool(environment)


def code_pool(config: EnvironmentConfig, allowed: Collection[str], digest: str | None) -> EnvironmentPool:
    """Start the processes of the user's code. ``allowed`` and ``digest`` are as for an ``EnvironmentPool``."""
    agent = ForkedCode(_SERVER, config.name, config.extra)
    return EnvironmentPool(config, allowed=allowed, digest=digest, agent=agent)


def program_pool(config: EnvironmentConfig) -> EnvironmentPool:
    """Start the processes of ``environment.command`` or of a taskset. This machine's user has allowed the program."""
    agent = ForkedCode(_SERVER, f"{_COMMAND}:Command", {"level": isolation.reach()[0]})
    if config.taskset:
        settings = {"python": config.python, "taskset": config.taskset, "extra": config.extra}
        agent = ForkedCode(_SERVER, f"{_TASKSET}:Taskset", settings)
    return EnvironmentPool(config, allowed=[_COMMAND, _TASKSET], digest=None, agent=agent)
