"""What a forward pass keeps for its backward pass, and that gradients do not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from async_rl.config.config import Config
from async_rl.config.learner import Recomputation
from async_rl.learner.data.packing import pack
from async_rl.learner.model.policy_model import to_device
from tests.learner.model.reference import engine_of
from tests.learner.tiny import random_sequences, tiny_config, tiny_model

NUM_TOKENS, HIDDEN, INTERMEDIATE = 96, 64, 256


def kept(config: Config) -> tuple[int, list[torch.Tensor]]:
    """The bytes that the decoder's forward pass leaves allocated, and the gradients."""
    model = engine_of(config).policy.model
    ((micro_batch,),) = pack(random_sequences(2, NUM_TOKENS // 2), max_tokens=1 << 20, num_ranks=1, packing="packed")
    batch = to_device(micro_batch, torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        hidden_Td = model.hidden_states(batch)
    hidden_Td.square().sum().backward()
    num_bytes = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
    return num_bytes, [p.grad for p in model.parameters() if p.grad is not None]


def test_each_way_keeps_what_it_says_and_gives_the_same_gradients_to_the_bit(tmp_path: Path):
    numbers: dict[Recomputation, float] = {}
    gradients: dict[Recomputation, list[torch.Tensor]] = {}
    for num_layers in (2, 6):
        shape: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
        tiny_model(tmp_path / f"{num_layers}", num_hidden_layers=num_layers, **shape)
    for how in get_args(Recomputation):
        settings = {"gradient_checkpointing": how}
        shallow, _ = kept(tiny_config(tmp_path, "2", model=settings))
        deep, gradients[how] = kept(tiny_config(tmp_path, "6", model=settings))
        numbers[how] = (deep - shallow) / 4 / (4 * NUM_TOKENS)
    # float32 numbers for each token and layer. The layer's input: d. Attention's output: d, and a sum for each head.
    # Outputs of products: gate and up, f each; q, o and down, d each; k and v, d / 2 each. All: norms, rotations, ...
    assert numbers["full"] == pytest.approx(HIDDEN, rel=0.3)
    assert numbers["attention"] - numbers["full"] == pytest.approx(HIDDEN + 2, rel=0.05)
    assert numbers["selective"] == pytest.approx(HIDDEN + 2 * INTERMEDIATE + 5 * HIDDEN, rel=0.05)
    assert numbers["none"] > 1.7 * numbers["selective"]
    for found in gradients.values():
        assert all(torch.equal(one, other) for one, other in zip(found, gradients["none"], strict=True))
