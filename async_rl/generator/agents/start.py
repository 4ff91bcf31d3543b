"""Opens the rollouts of agents, which the kind ``async_rl.rollouts`` has as ``agents``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from async_rl.data.chat import has_tokenizer, vocabulary_size
from async_rl.environments.pool import EnvironmentPool
from async_rl.generator.agents.front_process import Front
from async_rl.generator.agents.outside import OutsidePrograms
from async_rl.generator.agents.rollouts import AgentRollouts
from async_rl.generator.backend import TextBackend
from async_rl.generator.start.rollouts import RolloutSetup
from async_rl.net.address import refuse_open_connect
from async_rl.process.user_code import check_allowed_command, digest_of
from async_rl.queue.core.admission import train_sampling


@contextmanager
def open_agents(setup: RolloutSetup) -> Iterator[AgentRollouts]:
    """Start the front, and the pool of agents or the connection to the relay. It is an ``OpenRollouts``."""
    config, directory, relay = setup.config, setup.directory, setup.config.environment.relay
    if relay is not None:
        refuse_open_connect(relay, insecure=setup.insecure, has_keys=setup.keys is not None)
    text, sampling = setup.text(), config.sampling
    has_chats = not isinstance(setup.backend, TextBackend) and has_tokenizer(directory)
    longest = sampling.max_prompt_tokens + sampling.max_new_tokens
    tokenizer = directory if has_chats else None
    with closing(Front(Path(config.model.path).name, longest, tokenizer, config.data.template_arguments)) as front:
        if relay is not None:
            front.join(relay, setup.keys)
        with closing(OutsidePrograms(front) if relay else _pool(setup)) as pool:
            yield AgentRollouts(
                setup.backend, pool, front, setup.grader, text.render, config.environment, train_sampling(config),
                vocab_size=config.own_vocab_size or vocabulary_size(directory), max_abs=config.reward.max_abs,
                judged_by={name for one in config.reward.types for name in one.row_fields},
            )  # fmt: skip


def _pool(setup: RolloutSetup) -> EnvironmentPool:
    """Start the processes of ``environment.name`` or ``environment.command``."""
    environment, allowed = setup.config.environment, setup.config.generator.allow_code
    if environment.user_code:
        digest = digest_of(environment.user_code, setup.code_digests)
    else:
        check_allowed_command(environment.program, allowed, key=environment.program_key)
        digest, allowed = None, [environment.code.partition(":")[0]]
    return EnvironmentPool(environment, allowed=allowed, digest=digest, has_agents=True)
