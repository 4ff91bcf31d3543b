"""A pipeline of two stages computes what one process computes, with all that changes how a stage computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.learner.engine.ranks import init_ranks
from tests.learner.layouts import assert_same, run_layout
from tests.learner.ranks import run_ranks
from tests.learner.staged import STAGED, staged_config
from tests.learner.tiny import tiny_model


@pytest.mark.slow
def test_two_stages_take_the_steps_of_one_process(tmp_path: Path):
    tiny_model(tmp_path / "model", num_hidden_layers=3)
    alone = init_ranks(staged_config(tmp_path, {}, stages=1))
    for name, sections in STAGED.items():
        run_layout(staged_config(tmp_path, sections, stages=1), alone, tmp_path / "alone" / name)
    run_ranks("staged", tmp_path)
    for name in STAGED:
        assert_same(tmp_path / "staged" / name, tmp_path / "alone" / name)
    # The head's copy of the embedding follows it through steps in bfloat16, bit for bit.
    embedding, head = (torch.load(tmp_path / f"tied_{rank}.pt") for rank in range(2))
    assert torch.equal(embedding, head)
    found, _ = torch.load(tmp_path / "alone" / "skipped" / "found.pt", weights_only=False)
    assert all(loss != 0.0 for loss in found["loss"])
