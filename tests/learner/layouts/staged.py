"""Two steps in two stages of a pipeline, whose first and last have the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from async_rl.learner.ranks import init_ranks
from tests.learner.rank_layouts import layout_sequences
from tests.learner.rank_scenarios import PLAIN, follow_once, stop_following
from tests.learner.tiny import tiny_config


def run_staged(directory: Path) -> None:
    """What each rank does: two steps, after which it writes its copy of the tied weights."""
    from async_rl.learner.engine.fsdp_engine import FsdpEngine

    # This optimizer rounds at random, otherwise on each rank.
    sections = PLAIN | {"optimizer": {"lr": 1e-2, "name": "adamw_bf16"}, "model": {"dtype": "bfloat16"}}
    config = tiny_config(directory, "model", **sections, learner={"max_tokens": 40}, parallel={"pipeline": 2})
    ranks = init_ranks(config)
    engine = FsdpEngine(config, ranks)
    stage: Any = engine.policy.passes.stage
    before: Any = stage.tied_weight
    if ranks.is_leader:
        for version in range(2):
            assert engine.update(layout_sequences(), version=version).stepped
        stop_following(engine)
    else:
        follow_once(engine)
    after: Any = stage.tied_weight
    assert after is before
    torch.save(after.full_tensor().detach(), directory / f"tied_{ranks.rank}.pt")
    ranks.close()
