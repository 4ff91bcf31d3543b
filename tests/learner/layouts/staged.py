"""Steps in two stages of a pipeline, with settings that change how a stage computes or keeps things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from async_rl.config.config import Config
from async_rl.config.parallel import Layout
from async_rl.learner.ranks import Ranks, init_ranks
from tests.learner.rank_layouts import layout_sequences, run_layout
from tests.learner.rank_scenarios import PLAIN, follow_once, stop_following
from tests.learner.tiny import tiny_config

STAGED: dict[str, dict[str, Any]] = {
    "recomputed, kept for a step": {
        "model": {"gradient_checkpointing": "full"}, "learner": {"max_tokens": 40, "reshard": "none"},
    },
    "padded, kept for a micro-batch": {
        "learner": {"max_tokens": 60, "packing": "padded", "reshard": "after_backward"},
    },
    "skipped": {"loss": {"min_ess": 0.999}},
    "adapters, published as such": {
        "lora": {"rank": 4, "publish": "adapters"}, "generator": {"backend": "transformers"},
        "optimizer": {"name": "adamw_8bit"},
    },
    "adapters on 8-bit weights": {"lora": {"rank": 4, "base_bits": 8}, "optimizer": {"name": "muon"}},
}  # fmt: skip
"""Sections of variants that are compared with one process."""


def staged_config(directory: Path, sections: dict[str, Any], *, stages: int = 2) -> Config:
    """A step that reports its gradient, in several micro-batches."""
    sections = {"learner": {"max_tokens": 40}} | sections
    return tiny_config(directory, "model", **(PLAIN | sections | {"parallel": {"pipeline": stages}}))


def run_staged(directory: Path) -> None:
    """What each rank does: every variant, and two steps after which each stage writes its tied weights."""
    ranks = init_ranks(staged_config(directory, {}))
    for name, sections in STAGED.items():
        run_layout(staged_config(directory, sections), ranks, directory / "staged" / name)
    write_tied(directory, ranks)
    ranks.close()


def write_tied(directory: Path, ranks: Ranks) -> None:
    from async_rl.learner.engine.fsdp_engine import FsdpEngine

    # This optimizer rounds at random, otherwise on each rank.
    config = staged_config(directory, {"optimizer": {"lr": 1e-2, "name": "adamw_bf16"}, "model": {"dtype": "bfloat16"}})
    ranks.layout = Layout.of(config.parallel, ranks.world_size)
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
