"""Ranks that share layers or experts: which models can be divided, what is sent, and results under other settings."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from async_rl.errors import ModelError
from async_rl.learner.layouts import tensor_parallel
from async_rl.learner.layouts.expert_parallel import experts_to_divide
from async_rl.learner.layouts.tensor_parallel import divide, divisions
from async_rl.learner.model.policy_model import PolicyModel
from tests.families.catalogue import build


def wider(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(16, 33)


def with_a_norm(model: Any) -> None:
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(8)


@pytest.mark.parametrize(
    ("family", "change", "size", "message"),
    [
        ("Llama", None, 3, r"expected a divisor of the model's num_attention_heads, 4, got 3: 4 / 3 = 1.333"),
        ("Llama", None, 4, r"num_key_value_heads, 2, got 4: 2 / 4 = 0.5; choose another size"),
        ("Llama", wider, 2, r"outputs of model.layers.1.mlp.up_proj, 33, got 2: 33 / 2 = 16.5"),
        ("Llama", with_a_norm, 2, r"does not say how model.layers.0.self_attn.q_norm.weight is divided"),
        ("GPT-2", None, 2, "has a plan of tensor parallelism, but GPT2LMHeadModel has none"),
        ("OLMo 2", None, 2, r"self_attn.\w+ of Olmo2ForCausalLM is colwise_gather_output"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name_and_with_the_arithmetic(
    family: str, change: Callable[[Any], None] | None, size: int, message: str
):
    model = build(family)
    if change is not None:
        change(model)
    with pytest.raises(ModelError, match=message):
        divisions(PolicyModel(model, "padded"), size)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Llama", "experts that transformers' plans name, got LlamaForCaus"),
        ("Mixtral", "expected a divisor .* a layer, 4, got 3: 4 / 3 = 1.333;"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_with_the_arithmetic(family: str, message: str):
    with pytest.raises(ModelError, match=rf"parallel\.experts: .*{message}"):
        experts_to_divide(PolicyModel(build(family), "padded"), 3)


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
