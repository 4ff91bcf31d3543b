"""What plays a generator's rollouts: single answers, the turns of an environment, or what an extension offers.

The worker and offline evaluation call ``open_rollouts``. An extension offers an ``OpenRollouts`` under the name that
``Config.rollouts`` has, as ``async_rl.rollouts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.config import Config
from async_rl.data.chat import load_tokenizer, vocabulary_size
from async_rl.environments.pool import EnvironmentPool
from async_rl.generator.backend import Backend, Text, TextBackend
from async_rl.generator.environment_rollouts import EnvironmentRollouts, TokenizerText
from async_rl.generator.rollouts import RolloutSource, SingleTurnRollouts, ThreadGrader
from async_rl.net.keys import ClientKeys
from async_rl.process.user_code import digest_of
from async_rl.registry import find_offer, load


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """What a generator plays its rollouts with.

    Attributes:
        config: the run's, with this generator's own settings.
        backend: samples the answers. The loop steps it.
        grader: scores rollouts that come without a reward.
        directory: has the files of model and tokenizer.
        code_digests: the learner's digests of the user's own code. None: this machine's user chose the code.
        keys: this machine's keys; None if it has none.
        insecure: connect to other machines without keys.
    """

    config: Config
    backend: Backend
    grader: ThreadGrader
    directory: Path
    code_digests: Mapping[str, str] | None = None
    keys: ClientKeys | None = None
    insecure: bool = False

    def text(self) -> Text:
        """Return what renders and encodes text for the backend.

        Raises:
            ModelError: ``directory`` has no tokenizer.
        """
        if isinstance(self.backend, TextBackend):
            return self.backend.text
        data = self.config.data
        tokenizer = load_tokenizer(self.directory, needs_template=data.prompt_format == "chat")
        return TokenizerText(tokenizer, data.template_arguments, vocabulary_size(self.directory))


OpenRollouts = Callable[[RolloutSetup], AbstractContextManager[RolloutSource]]
"""Starts what plays rollouts, and ends it after the ``with`` block.

Raises:
    AddressError: another machine must be reached, and there are neither keys nor ``insecure``.
    ConfigError: the user's code is not allowed here, missing, different from the learner's, or fails when it is
        imported.
    ModelError: ``directory`` has no tokenizer, and one is needed.
"""


def open_rollouts(setup: RolloutSetup) -> AbstractContextManager[RolloutSource]:
    """Start what plays the rollouts of the config; see ``OpenRollouts``."""
    name = setup.config.rollouts
    if name in _OWN:
        return _OWN[name](setup)
    offer = find_offer("async_rl.rollouts", name)
    assert offer is not None, name
    return load(offer)(setup)


@contextmanager
def _answers(setup: RolloutSetup) -> Iterator[RolloutSource]:
    truncates = setup.config.data.on_long_prompt == "truncate"
    yield SingleTurnRollouts(setup.backend, setup.grader, truncates=truncates)


@contextmanager
def _turns(setup: RolloutSetup) -> Iterator[RolloutSource]:
    config, text = setup.config.environment, setup.text()
    digest, allowed = digest_of(config.name, setup.code_digests), setup.config.generator.allow_code
    with closing(EnvironmentPool(config, allowed=allowed, digest=digest)) as pool:
        yield EnvironmentRollouts(setup.backend, pool, text, config, max_abs=setup.config.reward.max_abs)


_OWN: Mapping[str, OpenRollouts] = {"answers": _answers, "turns": _turns}
