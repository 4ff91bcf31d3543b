"""A value head on a tiny policy, and its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.learner.losses.value import critic_sequences
from async_rl.learner.packing import TrainSequence
from tests.learner.rank_scenarios import PLAIN
from tests.learner.tiny import tiny_config

TRUNK: dict[str, dict[str, Any]] = PLAIN | {
    "learner": {"max_tokens": 40},
    "loss": {"advantage": "gae", "skip_threshold": 0},
    "critic": {"trunk": "policy", "lr": 1e-2, "max_grad_norm": 1e9, "value_clip": 0.1},
}


def trunk_config(directory: Path, **sections: Any) -> Config:
    """A config of the model ``qwen2``, whose sections are those of ``TRUNK`` with the given keys."""
    merged = {name: TRUNK.get(name, {}) | sections.get(name, {}) for name in TRUNK.keys() | sections.keys()}
    return tiny_config(directory, "qwen2", **merged)


def with_targets(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """Random targets, and old values near 0."""
    rng = np.random.default_rng(3)
    counts = {s.sequence_id: int(s.loss_mask.sum()) for s in sequences}
    old = {i: rng.normal(0, 0.2, count) for i, count in counts.items()}
    targets = {i: rng.normal(0, 1, count) for i, count in counts.items()}
    return critic_sequences(sequences, targets, old)
