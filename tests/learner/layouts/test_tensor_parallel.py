"""Tensor parallelism: which models can be divided, what is sent, and results under other settings."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from async_rl.errors import ModelError
from async_rl.learner.layouts import tensor_parallel
from async_rl.learner.layouts.experts import find_experts
from async_rl.learner.layouts.tensor_parallel import divide, divisions
from async_rl.learner.model.policy_model import PolicyModel
from tests.families.catalogue import build
from tests.learner.engine import shared_cases


def policy(family: str) -> PolicyModel:
    return PolicyModel(build(family), "padded")


def test_heads_that_cannot_be_divided_are_refused_with_the_arithmetic():
    with pytest.raises(
        ModelError, match=r"expected a divisor of the model's num_attention_heads, 4, got 3: 4 / 3 = 1.333"
    ):
        divisions(policy("Llama"), 3)


def test_more_ranks_than_key_value_heads_are_refused_with_the_arithmetic():
    with pytest.raises(ModelError, match=r"num_key_value_heads, 2, got 4: 2 / 4 = 0.5; choose another size"):
        divisions(policy("Llama"), 4)


def test_columns_that_cannot_be_divided_are_refused_with_the_arithmetic():
    model = build("Llama")
    model.model.layers[1].mlp.up_proj = nn.Linear(16, 33)
    with pytest.raises(ModelError, match=r"outputs of model.layers.1.mlp.up_proj, 33, got 2: 33 / 2 = 16.5"):
        divisions(PolicyModel(model, "padded"), 2)


def test_a_model_without_a_plan_is_refused_by_name():
    with pytest.raises(ModelError, match="has a plan of tensor parallelism, but GPT2LMHeadModel has none"):
        divisions(policy("GPT-2"), 2)


def test_a_plan_that_is_not_understood_is_refused_by_name():
    with pytest.raises(ModelError, match=r"self_attn.\w+ of Olmo2ForCausalLM is colwise_gather_output"):
        divisions(policy("OLMo 2"), 2)


def test_a_parameter_beside_divided_columns_that_the_plan_leaves_out_is_refused():
    model: Any = build("Llama")
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(8)
    with pytest.raises(ModelError, match=r"does not say how model.layers.0.self_attn.q_norm.weight is divided"):
        divisions(PolicyModel(model, "padded"), 2)


def test_experts_that_cannot_be_divided_are_refused_with_the_arithmetic():
    with pytest.raises(ModelError, match=r"parallel.tensor: expected a divisor of the experts of a layer, 4, got 3"):
        find_experts(policy("Qwen 3 MoE"), 3, "parallel.tensor")


def test_what_a_tensor_groups_layers_took_is_freed(monkeypatch: pytest.MonkeyPatch):
    # It was not: a step's inputs of all layers stayed, and with recomputation all that was computed from them.
    monkeypatch.setattr(tensor_parallel, "_summed", lambda tensor, group: tensor.clone())
    hidden = torch.ones(2, requires_grad=True) * 2
    copies = [tensor_parallel._copied(hidden, cast(Any, None)) for _ in range(2)]
    assert copies[0] is copies[1]
    freed = weakref.ref(hidden)
    del hidden, copies
    assert freed() is None


def test_an_attention_and_an_mlp_send_one_sum_in_each_pass(monkeypatch: pytest.MonkeyPatch):
    sums: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args, **kwargs: sums.append(tensor.numel()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = build("Qwen 2")
        ids = torch.arange(7)[None]
        expected = model.model(input_ids=ids).last_hidden_state
        mesh = init_device_mesh("cpu", (1,))
        divide(model, divisions(PolicyModel(model, "padded"), 1), mesh)
        found = model.model(input_ids=ids).last_hidden_state
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found, expected)
    # Two layers, and the embedding. Each sum is of 7 tokens.
    size = found.numel()
    assert sums == [size] * 5
    found.sum().backward()
    assert sums == [size] * 9


@pytest.mark.slow
def test_settings_and_families_compute_the_same_in_a_tensor_group_as_alone(tmp_path: Path):
    shared_cases.compare_with_one_process(tmp_path, list(shared_cases.VARIANTS), {"tensor": 2})
    found, alone = (
        torch.load(tmp_path / run / "sampling masks" / "found.pt", weights_only=False) for run in ("two", "alone")
    )
    assert found[0]["flops"] == alone[0]["flops"]


@pytest.mark.long
def test_more_settings_and_families_compute_the_same_in_a_tensor_group_as_alone(tmp_path: Path):
    shared_cases.compare_with_one_process(tmp_path, list(shared_cases.MORE), {"tensor": 2})
