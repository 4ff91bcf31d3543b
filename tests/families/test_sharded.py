"""Families with layers, positions and ties of their own, sharded over two ranks: the step of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.generator.hf.causal_model import WeightTable
from tests.families.catalogue import build
from tests.learner.model.reference import assert_near, gradients
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "OPT, projected", "Gemma 2", "BLOOM", "Qwen 3 Next", "Mamba 2", "Zamba 2"])
def test_two_ranks_take_the_step_of_one_and_publish_the_same(tmp_path: Path, name: str):
    tiny_model(tmp_path / "model")
    model: Any = build(name)
    model.save_pretrained(tmp_path / "model")
    for world_size in (1, 2):
        run_ranks("sharded", tmp_path, world_size=world_size)
    one, two = (gradients(tmp_path / f"ranks_{n}") for n in (1, 2))
    assert_near(two, one)
    (loss, norm, published), (loss_2, norm_2, published_2) = (torch.load(tmp_path / f"published_{n}") for n in (1, 2))
    assert (loss_2, norm_2) == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
    # The engine takes what is published: every parameter once, none unknown.
    WeightTable(model).check(published_2)
    assert list(published) == list(published_2)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for key, tensor in published_2.items():
        # Adam's first step may differ where a gradient is only rounding.
        assert (tensor - published[key]).abs().mean() < 1e-5, key
        assert not torch.equal(tensor, before[key]) or not bool(one[key].any()), key
