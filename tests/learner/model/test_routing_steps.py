"""An engine with routing replay takes the same step, however it is cut, and its reference chooses by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.errors import ModelError
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.moe import moe_model
from tests.learner.rank_scenarios import REPLAYED, routed, routed_config, save
from tests.learner.ranks import run_ranks
from tests.learner.tiny import random_sequences, tiny_model


def stepped(root: Path, name: str, **sections: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """One update on routed sequences: its statistics and its gradients."""
    config = routed_config(root, **sections)
    engine = FsdpEngine(config, init_ranks(config))
    stats = engine.update(routed(random_sequences(5, 12, spread=4)), version=0)
    save(engine, root / name, 1)
    engine.close()
    found = load_tensors(root / name, OPTIMIZER)
    return stats, {key: tensor for key, tensor in found.items() if key.startswith("exp_avg.")}


def assert_near(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        torch.testing.assert_close(tensor, right[key], atol=1e-5, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "targets": ["q_proj", "o_proj"]}])
def test_a_step_is_the_same_recomputed_padded_and_in_small_micro_batches(tmp_path: Path, lora: dict[str, Any]):
    moe_model(tmp_path / "model")
    stats, expected = stepped(tmp_path, "plain", lora=lora)
    assert stats.routing is not None
    assert stats.routing[0] > stats.routing[1] / 2
    assert lora or expected["exp_avg.model.layers.0.mlp.gate.weight"].abs().max() > 0
    for name, sections in (
        ("recomputed", {"model": {"gradient_checkpointing": "full"}}),
        ("recomputed in part", {"model": {"gradient_checkpointing": "selective"}}),
        ("small", {"learner": {"max_tokens": 20}}),
        ("padded", {"learner": {"packing": "padded"}}),
    ):
        other, gradients = stepped(tmp_path, name, lora=lora, **sections)
        assert_near(gradients, expected)
        assert other.routing == stats.routing, name
    _, free = stepped(tmp_path, "free", lora=lora, model={"routing_replay": False})
    assert max(float((free[key] - expected[key]).abs().max()) for key in free) > 1e-4


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path: Path):
    moe_model(tmp_path / "model")
    stats, expected = stepped(tmp_path, "one")
    run_ranks("replayed", tmp_path)
    for name in REPLAYED:
        found = load_tensors(tmp_path / name, OPTIMIZER)
        assert_near({key: tensor for key, tensor in found.items() if key.startswith("exp_avg.")}, expected)
        assert (tmp_path / name / "routing.txt").read_text() == str(stats.routing)


def test_the_reference_chooses_by_itself(tmp_path: Path):
    moe_model(tmp_path / "model")
    scores = []
    for lora in ({}, {"rank": 2, "targets": ["o_proj"]}):
        config = routed_config(tmp_path, lora=lora, loss={"kl_coef": 0.1, "kl_placement": "loss"})
        engine = FsdpEngine(config, init_ranks(config))
        given = routed(random_sequences(3, 10))
        free: list[TrainSequence] = [replace(s, routes=None) for s in given]
        assert not np.array_equal(engine.score(given, of="policy")[0], engine.score(free, of="policy")[0])
        np.testing.assert_array_equal(engine.score(given, of="reference")[0], engine.score(free, of="reference")[0])
        scores.append(engine.score(given, of="reference")[0])
        engine.close()
    np.testing.assert_array_equal(*scores)


def test_a_dense_model_is_refused_by_the_key(tmp_path: Path):
    tiny_model(tmp_path / "model")
    config = routed_config(tmp_path)
    with pytest.raises(ModelError, match=r"routing_replay: expected a model with experts .*, got 'qwen2'"):
        FsdpEngine(config, init_ranks(config))
