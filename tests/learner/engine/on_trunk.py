"""A value head on a tiny policy, its batches, and what rank processes do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config.config import Config
from async_rl.config.parallel import Layout
from async_rl.learner.losses.value import critic_sequences
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.rank_layouts import LAYOUTS, LORA, layout_sequences
from tests.learner.rank_scenarios import PLAIN, follow_once, save, stop_following
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


def run_on_trunk(directory: Path) -> None:
    """Under each layout of ``trunk.json``: load the checkpoint ``begun``, score, update the head and the policy, score
    in between, and save.
    """
    from async_rl.learner.engine.fsdp_engine import FsdpEngine

    names = json.loads((directory / "trunk.json").read_text(encoding="utf-8"))
    ranks = init_ranks(trunk_config(directory))
    for name in names:
        config = trunk_config(directory, parallel=LAYOUTS[name][1], **LORA)
        ranks.layout = Layout.of(config.parallel, ranks.world_size)
        engine = FsdpEngine(config, ranks)
        if not ranks.is_leader:
            follow_once(engine)
            continue
        assert engine.critic is not None
        engine.load(directory / "begun")
        engine.self_test()
        sequences = layout_sequences()
        found = [engine.critic.score(sequences)]
        stats = engine.critic.update(with_targets(sequences), version=0)
        found.append(engine.critic.score(sequences))
        save(engine, directory / f"saved {name}", 1)
        policy = engine.update(sequences, version=0)
        found.append(engine.critic.score(sequences))
        numbers = (stats.loss, stats.grad_norm, stats.tokens_trained, policy.grad_norm)
        torch.save((found, numbers), directory / f"{name}.pt")
        stop_following(engine)
    ranks.close()
