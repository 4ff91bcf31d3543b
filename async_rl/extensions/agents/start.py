"""Opens the rollouts of agents, which the kind ``async_rl.rollouts`` has as ``agents``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from async_rl.config.config import Config
from async_rl.data.chat import has_tokenizer, vocabulary_size
from async_rl.extensions.agents.front.process import Front
from async_rl.extensions.agents.front.requests import RequestRules
from async_rl.extensions.agents.outside_programs import OutsidePrograms
from async_rl.extensions.agents.programs.isolation import warning
from async_rl.extensions.agents.programs.pool import agent_pool
from async_rl.extensions.agents.rollouts import AgentRollouts
from async_rl.generator.backend import TextBackend
from async_rl.generator.start.rollouts import RolloutSetup
from async_rl.net.address import refuse_open_connect
from async_rl.queue.core.admission import train_sampling

logger = logging.getLogger(__name__)


def open_front(config: Config, tokenizer: Path | None) -> Front:
    """Start the HTTP front for the config's model. ``tokenizer`` is as in ``Front``."""
    sampling = config.sampling
    longest = sampling.max_prompt_tokens + sampling.max_new_tokens
    settings = config.environment
    rules = RequestRules(Path(config.model.path).name, frozenset(settings.untrained_models), settings.other_settings)
    return Front(rules, longest, tokenizer, config.data.template_arguments)


@contextmanager
def open_agents(setup: RolloutSetup) -> Iterator[AgentRollouts]:
    """Start the front, and the pool of agents or the connection to the relay. It is an ``OpenRollouts``."""
    config, directory, relay = setup.config, setup.directory, setup.config.environment.relay
    if relay is not None:
        refuse_open_connect(relay, insecure=setup.insecure, has_keys=setup.keys is not None)
    if config.environment.command and (warned := warning(config.environment.sandbox)):
        logger.warning("%s", warned)
    text = setup.text()
    has_chats = not isinstance(setup.backend, TextBackend) and has_tokenizer(directory)
    with closing(open_front(config, directory if has_chats else None)) as front:
        if relay is not None:
            front.join(relay, setup.keys)
        with closing(OutsidePrograms(front) if relay else agent_pool(config, setup.code_digests)) as pool:
            yield AgentRollouts(
                setup.backend, pool, front, setup.grader, text.render, config.environment, train_sampling(config),
                vocab_size=config.own_vocab_size or vocabulary_size(directory), max_abs=config.reward.max_abs,
                judged_by={name for one in config.reward.types for name in one.row_fields},
            )  # fmt: skip
