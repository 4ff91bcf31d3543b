"""Engines with a critic that are saved and restored, whatever the critic is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from async_rl.config.config import Config
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.rank_scenarios import save


def engine_of(config: Config) -> FsdpEngine:
    return FsdpEngine(config, init_ranks(config))


def restored(
    engine: FsdpEngine, config: Config, directory: Path, sequences: Sequence[TrainSequence]
) -> tuple[FsdpEngine, dict[int, np.ndarray]]:
    """Save ``engine`` to the checkpoint ``directory``, and load it. The critic's values of ``sequences``, [trained
    tokens], must have the same bits in the new engine, which is returned with them.
    """
    again = engine_of(config)
    assert engine.critic is not None
    assert again.critic is not None
    values = engine.critic.score(sequences)
    save(engine, directory, 1)
    write_manifest(directory)
    again.load(directory)
    assert all(np.array_equal(of, values[i]) for i, of in again.critic.score(sequences).items())
    return again, values
