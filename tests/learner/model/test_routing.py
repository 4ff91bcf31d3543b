"""Routers that are told which experts to choose, in every family; steps with routing replay, however they are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.learner import ModelConfig
from async_rl.errors import ModelError
from async_rl.learner.data.packing import Packing, from_arrays, pack, to_arrays
from async_rl.learner.model import routing
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from async_rl.learner.model.routing import RouterHooks, gates
from async_rl.learner.model.self_test import check_replay
from async_rl.learner.sequences import TrainSequence
from async_rl.routes import FAMILIES
from tests.learner.model.reference import Tensors, engine_of, gradients
from tests.learner.moe import moe_model
from tests.learner.rank_scenarios import routed, routed_config, save
from tests.learner.tiny import random_sequences, tiny_config, tiny_model


def policy_of(directory: Path, packing: Packing = "packed") -> PolicyModel:
    policy = PolicyModel(load_model(ModelConfig(path=str(directory))), packing)
    policy.routers = RouterHooks(policy.causal_lm)
    return policy


NOT_PACKED = {"gpt_oss"}
"""Families whose attention can't be packed."""
WAYS = [(family, "padded") for family in FAMILIES] + [(f, "packed") for f in FAMILIES if f not in NOT_PACKED]


@pytest.mark.parametrize(("model_type", "packing"), WAYS)
def test_replaying_the_routers_own_choice_changes_nothing(tmp_path: Path, model_type: str, packing: Packing):
    check_replay(policy_of(moe_model(tmp_path, model_type), packing))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoe"])
def test_a_router_that_computes_its_weights_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
):
    policy = policy_of(moe_model(tmp_path, model_type))
    monkeypatch.setattr(routing, "gates", lambda _family, _router, logits, chosen: logits.gather(1, chosen).sigmoid())
    with pytest.raises(ModelError, match=r"routing_replay: with its own choice of experts replayed, .* changes by"):
        check_replay(policy)


def test_given_experts_get_the_weights_of_the_routers_logits():
    # Logits 0, log 2, log 3, log 4 of one token; experts 1 and 3 are given: 2 / 10 and 4 / 10, or 1/3 and 2/3.
    class Router:
        norm_topk_prob, routed_scaling_factor = True, 1.5

    logits, chosen = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log(), torch.tensor([[3, 1]])
    normal, plain = Router(), Router()
    plain.norm_topk_prob = False
    for model_type, router, expected in (
        ("qwen2_moe", plain, [0.4, 0.2]), ("qwen3_moe", normal, [2 / 3, 1 / 3]), ("mixtral", object(), [2 / 3, 1 / 3]),
        ("gpt_oss", object(), [2 / 3, 1 / 3]),
        # The sigmoid of log x is x / (1 + x): 4 / 5 and 2 / 3, whose sum is 22 / 15.
        ("glm4_moe", plain, [1.2, 1.0]), ("glm4_moe", normal, [1.5 * 12 / 22, 1.5 * 10 / 22]),
    ):  # fmt: skip
        torch.testing.assert_close(gates(FAMILIES[model_type], router, logits, chosen), torch.tensor([expected]))


def test_routes_go_with_their_tokens_through_packing_and_the_wire():
    first, other = routed(random_sequences(2, 6))
    assert first.routes is not None
    assert other.routes is not None
    # 6 tokens, the first two of them the prompt; the last is not computed. The other prompt has other routes.
    same_tokens = replace(other, token_ids=first.token_ids.copy())
    ((apart,),) = pack([first, same_tokens], max_tokens=64, num_ranks=1)
    np.testing.assert_array_equal(apart.routes.reshape(10, 3, 2), np.concatenate([first.routes[:5], other.routes[:5]]))
    same_routes = replace(same_tokens, routes=np.concatenate([first.routes[:2], other.routes[2:]]))
    ((batch,),) = pack([first, same_routes], max_tokens=64, num_ranks=1)
    assert (len(batch.token_ids), len(batch.routes)) == (5 + 3, 8 * 6)
    np.testing.assert_array_equal(batch.routes.reshape(8, 3, 2), np.concatenate([first.routes[:5], other.routes[2:5]]))
    np.testing.assert_array_equal(from_arrays(to_arrays(batch)).routes, batch.routes)
    ((free,),) = pack(random_sequences(2, 6), max_tokens=64, num_ranks=1)
    assert (free.routes.dtype, len(free.routes)) == (np.uint16, 0)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_experts_of_every_token_are_the_given_ones(tmp_path: Path, packing: Packing):
    policy, sequences = policy_of(moe_model(tmp_path), packing), routed(random_sequences(3, 8, spread=3))
    ((micro_batch,),) = pack(sequences, max_tokens=256, num_ranks=1, packing=packing)
    batch = to_device(micro_batch, torch.device("cpu"), packing)
    seen: list[torch.Tensor] = []
    for module in policy.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[2]))
    assert policy.routers is not None
    with policy.routers.recording() as own:
        policy(batch)
    for layer, chosen in enumerate(seen):
        of_row = chosen if packing == "packed" else chosen[batch.layout.padding[1]]
        np.testing.assert_array_equal(of_row.numpy(), micro_batch.routes.reshape(-1, 3, 2)[:, layer])
    # Every token of the row is counted once for each layer, padding is not.
    num_tokens = len(micro_batch.token_ids)
    own_rows = [o if packing == "packed" else o[batch.layout.padding[1]] for _, o in sorted(own.items())]
    differing = sum(
        set(o.tolist()) != set(g.tolist())
        for layer, rows in enumerate(own_rows)
        for o, g in zip(rows, micro_batch.routes.reshape(-1, 3, 2)[:, layer], strict=True)
    )
    assert policy.routers.num_counted == 3 * num_tokens
    assert int(policy.routers.num_different) == differing > num_tokens


def stepped(root: Path, name: str, **sections: Any) -> tuple[Any, Tensors]:
    """One update on routed sequences: its statistics and its gradients."""
    engine = engine_of(routed_config(root, **sections))
    stats = engine.update(routed(random_sequences(5, 12, spread=4)), version=0)
    save(engine, root / name, 1)
    engine.close()
    return stats, gradients(root / name)


def assert_near(left: Tensors, right: Tensors) -> None:
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "targets": ["q_proj", "o_proj"]}])
def test_a_step_is_the_same_recomputed_padded_and_in_small_micro_batches(tmp_path: Path, lora: dict[str, Any]):
    moe_model(tmp_path / "model")
    stats, expected = stepped(tmp_path, "plain", lora=lora)
    assert stats.routing is not None
    assert stats.routing[0] > stats.routing[1] / 2
    assert lora or expected["model.layers.0.mlp.gate.weight"].abs().max() > 0
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


def test_the_reference_chooses_by_itself(tmp_path: Path):
    moe_model(tmp_path / "model")
    scores = []
    for lora in ({}, {"rank": 2, "targets": ["o_proj"]}):
        engine = engine_of(routed_config(tmp_path, lora=lora, loss={"kl_coef": 0.1, "kl_placement": "loss"}))
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
        engine_of(config)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_routers_losses_in_the_models_config_change_nothing(tmp_path: Path, model_type: str):
    found = []
    for name, settings in (("plain", {}), ("beside", {"output_router_logits": True, "router_aux_loss_coef": 10.0})):
        moe_model(tmp_path / name, model_type, **settings)
        engine = engine_of(tiny_config(tmp_path, name, learner={"max_tokens": 512}))
        stats = engine.update(random_sequences(4, 12), version=0)
        assert stats.grad_norm > 0
        found.append((stats.loss, stats.grad_norm, dict(engine.gather())))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
