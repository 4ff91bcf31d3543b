"""Engines with a critic that are updated, saved and restored, whatever the critic is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.interface import UpdateStats
from async_rl.learner.losses.value import value_loss
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


def updated_as_plain_torch(
    engine: FsdpEngine, sequences: Sequence[TrainSequence], plain_values: Callable[[TrainSequence], Tensor]
) -> UpdateStats:
    """Update the critic, whose values are clipped at 0.1, and compare what it reports with plain torch, in which this
    leaves the gradients. ``plain_values`` are those of a sequence. The policy must stay as it is.
    """
    assert engine.critic is not None
    before, values = engine.score(sequences, of="policy"), engine.critic.score(sequences)
    stats = engine.critic.update(sequences, version=0)
    losses, clipped = [], []
    for sequence in sequences:
        mask, of_model = sequence.loss_mask, plain_values(sequence)
        np.testing.assert_allclose(values[sequence.sequence_id], of_model.detach(), atol=1e-5, rtol=1e-5)
        targets, old = (torch.from_numpy(a[mask]) for a in (sequence.value_targets, sequence.old_values))
        loss, is_clipped = value_loss(of_model, targets, old, 0.1)
        losses.append(loss)
        clipped.append(is_clipped)
    total = torch.cat(losses).mean()
    total.backward()
    assert stats.loss == pytest.approx(total.item(), rel=1e-5)
    assert stats.own_metrics == {"critic/clip_fraction": pytest.approx(torch.cat(clipped).double().mean().item())}
    assert 0 < stats.own_metrics["critic/clip_fraction"] < 1
    assert stats.tokens_trained == len(torch.cat(losses))
    after = engine.score(sequences, of="policy")
    assert all((after[i] == before[i]).all() for i in before)
    return stats
