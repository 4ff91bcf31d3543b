"""The operations of a step: by hand, against torch's own counter, and the peaks of devices by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from async_rl.config.learner import ModelConfig
from async_rl.learner.data.packing import pack
from async_rl.learner.engine.flops import StepFlops, peak_flops_per_s
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from async_rl.learner.sequences import TrainSequence
from tests.learner.tiny import random_sequences, tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
# A layer: query and output 4 x 4, key and value 4 x 2, gate, up and down 4 x 6: 16 + 16 + 8 + 8 + 72 = 120 numbers.
# Attention: queries and values of 2 heads of 2, so 6 * (4 + 4) = 48 for each pair and layer.
BY_HAND = StepFlops(per_token=6 * 240, per_prediction=6 * 40, per_pair=((None, 96),))


def sequence(number: int, token_ids: list[int], num_trained: int) -> TrainSequence:
    mask = np.arange(len(token_ids)) >= len(token_ids) - num_trained
    nothing = np.zeros(len(token_ids), dtype=np.float32)
    return TrainSequence(
        sequence_id=number,
        token_ids=np.array(token_ids, np.int32),
        loss_mask=mask,
        behavior_logprobs=nothing,
        versions=np.zeros(len(token_ids), np.int32),
        advantages=nothing,
        temperature=1.0,
    )


def test_the_costs_of_a_model_are_those_worked_by_hand():
    assert StepFlops.of_model(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))) == BY_HAND
    assert StepFlops.of_model(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False))) == BY_HAND


def test_a_frozen_matrix_has_no_gradient_of_its_own():
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).requires_grad_(False)
    assert StepFlops.of_model(model) == StepFlops(per_token=4 * 240, per_prediction=4 * 40, per_pair=((None, 96),))


def test_only_experts_that_compute_a_token_count():
    # Attention as above: 48 numbers. Router 4 x 8. Of 8 experts of 72 numbers each, 2 compute a token.
    shape: dict[str, Any] = SHAPE | {"num_hidden_layers": 1, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert StepFlops.of_model(MixtralForCausalLM(MixtralConfig(**shape))).per_token == 6 * (48 + 32 + 2 * 72)


def test_a_shared_prompt_counts_once_and_the_last_token_not_at_all():
    # Prompt 1 2, answers 3 4 and 5 6. The row is 1 2 3 5: nothing is predicted from 4 and 6.
    # They attend to 1 + 2 + 3 + 3 tokens, and 4 tokens are predicted.
    sequences = [sequence(0, [1, 2, 3, 4], 2), sequence(1, [1, 2, 5, 6], 2)]
    (row,) = pack(sequences, max_tokens=16, num_ranks=1)[0]
    assert BY_HAND.of(row) == 4 * 1440 + 4 * 240 + 9 * 96


def test_a_window_bounds_the_tokens_that_one_attends_to():
    # The row 1 2 3 attends to 1 + 2 + 2 tokens through a window of 2, and to 1 + 2 + 3 without one.
    (row,) = pack([sequence(0, [1, 2, 3, 4], 1)], max_tokens=16, num_ranks=1)[0]
    costs = StepFlops(per_token=0, per_prediction=0, per_pair=((2, 10), (None, 1)))
    assert costs.of(row) == 5 * 10 + 6


def test_layers_with_and_without_a_window_are_told_apart():
    shape: dict[str, Any] = SHAPE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    assert StepFlops.of_model(model).per_pair == ((None, 48.0), (8, 48.0))


def test_the_count_is_that_of_torch(tmp_path: Path):
    path = tiny_model(tmp_path / "model", tied=False, hidden_size=64, intermediate_size=160)
    policy = PolicyModel(load_model(ModelConfig(path=str(path))), "packed")
    # Of one length, so that nothing is padded. torch counts all pairs of a causal attention, and not half of them.
    (row,) = pack(random_sequences(3, 48), max_tokens=256, num_ranks=1)[0]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        policy(to_device(row, torch.device("cpu"))).logprobs.sum().backward()
    costs = StepFlops.of_model(policy.causal_lm)
    ((_, per_pair),) = costs.per_pair
    lengths = np.diff(row.cu_seqlens)
    surplus = per_pair * float((lengths * (lengths - 1) // 2).sum())
    counted = cast(int, counter.get_total_flops())
    assert costs.of(row) + surplus == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("a device that nobody made", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(name: str, peak: float | None):
    assert peak_flops_per_s(name, torch.bfloat16) == peak
    assert peak_flops_per_s(name, torch.float32) is None
