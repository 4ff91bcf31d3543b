"""The load-balancing loss of routers is transformers', which TRL adds, of each micro-batch, however a step is made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.errors import ModelError
from async_rl.learner.sequences import TrainSequence
from async_rl.routes import FAMILIES
from tests.learner.model.reference import Tensors, assert_near, engine_of, gradients, plain_model, plain_step
from tests.learner.moe import moe_model
from tests.learner.rank_scenarios import BALANCED, balanced_config, save
from tests.learner.ranks import run_ranks
from tests.learner.tiny import random_sequences, tiny_model, trained_tokens

COEF = 0.1


def trl_loss(model: Any, micro_batch: Sequence[TrainSequence]) -> torch.Tensor:
    """TRL's ``aux_loss`` of these sequences. The last token of each is never computed here."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    ids = [torch.from_numpy(s.token_ids[None, :-1]).long() for s in micro_batch]
    by_layer = zip(*(model(input_ids=i, output_router_logits=True).router_logits for i in ids), strict=True)
    logits: Any = tuple(torch.cat(layer) for layer in by_layer)
    loss = load_balancing_loss_func(logits, 8, 2)
    assert isinstance(loss, torch.Tensor)
    return loss


def trl_step(directory: Path, sequences: list[TrainSequence], *, apart: bool) -> tuple[float, Tensors]:
    """The loss and the gradients of a step, with each sequence in a micro-batch of its own if ``apart``."""
    _, policy = plain_step(directory, sequences)
    model = plain_model(directory)
    parts = [[sequence] for sequence in sequences] if apart else [sequences]
    shares = [trained_tokens(part) / trained_tokens(sequences) for part in parts]
    loss = torch.stack([share * trl_loss(model, part) for share, part in zip(shares, parts, strict=True)]).sum()
    loss.backward()
    balance = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert balance["model.layers.0.mlp.gate.weight"].abs().max() > 1e-3
    return float(loss.detach()), {name: policy[name] + COEF * balance.get(name, 0) for name in policy}


WAYS: dict[str, dict[str, Any]] = {
    "packed": {"learner": {"max_tokens": 512}},
    "padded": {"learner": {"max_tokens": 512, "packing": "padded"}},
    "recomputed": {"learner": {"max_tokens": 512}, "model": {"gradient_checkpointing": "full"}},
    "recomputed in part": {"learner": {"max_tokens": 512}, "model": {"gradient_checkpointing": "selective"}},
    "apart": {},
}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_step_has_trls_loss_and_its_gradients_by_each_micro_batchs_share_of_tokens(tmp_path: Path, model_type: str):
    moe_model(tmp_path / "model", model_type)
    sequences = random_sequences(5, 14, spread=3)
    expected = {apart: trl_step(tmp_path / "model", sequences, apart=apart) for apart in (False, True)}
    assert abs(expected[True][0] - expected[False][0]) > 0.01
    for way, sections in WAYS.items():
        engine = engine_of(balanced_config(tmp_path, **sections))
        engine.score(sequences, of="policy")  # it counts nothing
        stats = engine.update(sequences, version=0)
        loss, of_trl = expected[way == "apart"]
        assert stats.balance_loss == pytest.approx(loss, rel=1e-5), way
        # Every token of the rows chooses 2 experts in each of 3 layers.
        assert stats.expert_load.sum(1).tolist() == [2.0 * sum(len(s.token_ids) - 1 for s in sequences)] * 3
        save(engine, tmp_path / way, 1)
        engine.close()
        assert_near(gradients(tmp_path / way), of_trl)


@pytest.mark.slow
def test_ranks_take_the_step_of_one_process(tmp_path: Path):
    moe_model(tmp_path / "model", num_key_value_heads=2)
    loss, expected = trl_step(tmp_path / "model", sequences := random_sequences(5, 14, spread=3), apart=True)
    run_ranks("balanced", tmp_path)
    for name in BALANCED:
        found, load = torch.load(tmp_path / name / "balance.pt", weights_only=False)
        assert found == pytest.approx(loss, rel=1e-5), name
        # Ranks of a tensor group choose alike.
        num_tokens = sum(len(s.token_ids) - 1 for s in sequences) * (2 if name == "tensor" else 1)
        num_dummies = name in ("shards", "experts")  # of one token, for the rank that has no fifth sequence
        assert load.sum(1).tolist() == [2.0 * (num_tokens + num_dummies)] * 3
        assert_near(gradients(tmp_path / name), expected)


@pytest.mark.parametrize("model_type", [t for t, family in FAMILIES.items() if family.gates == "sigmoid"])
def test_routers_with_a_bias_and_dense_models_are_refused_by_the_key(tmp_path: Path, model_type: str):
    moe_model(tmp_path / "model", model_type)
    with pytest.raises(ModelError, match=rf"loss\.load_balancing_coef: .* got '{model_type}', whose .* by a bias"):
        engine_of(balanced_config(tmp_path))
    tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"loss\.load_balancing_coef: .*, got 'qwen2'"):
        engine_of(balanced_config(tmp_path))
