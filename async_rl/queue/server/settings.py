"""The queue's settings of a config, with what they need of the model's files.

Called by the server, and by the checks of ``launch`` and the doctor.
"""

from __future__ import annotations

from async_rl.config.config import Config
from async_rl.data.chat import model_routing, vocabulary_size
from async_rl.queue.core.admission import QueueSettings


def settings_of(config: Config) -> QueueSettings:
    """Return the settings of the queue of ``config``.

    Raises:
        ConfigError: the queue can't hold the groups of one step.
        ModelError: the size of these groups depends on the model, which is missing.
    """
    routing = model_routing(config.model.path) if config.model.routing_replay else None
    return QueueSettings.from_config(config, vocab_size=_vocabulary_size(config), routing=routing)


def _vocabulary_size(config: Config) -> int | None:
    """Return the size of the model's vocabulary if sampling masks depend on it (top-p or min-p without top-k)."""
    if config.sampling.top_k or (config.sampling.top_p == 1 and config.sampling.min_p == 0):
        return None
    return config.own_vocab_size or vocabulary_size(config.model.path)
