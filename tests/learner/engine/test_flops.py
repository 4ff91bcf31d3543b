"""The cost of a step: its operations by hand and against torch's own counter, its phases and its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from async_rl.config.learner import ModelConfig
from async_rl.learner import phases
from async_rl.learner.data.balance import Work
from async_rl.learner.data.packing import pack
from async_rl.learner.engine.flops import StepFlops, peak_flops_per_s
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from async_rl.learner.sequences import TrainSequence
from tests.families.catalogue import build
from tests.learner.model.reference import engine_of
from tests.learner.tiny import random_sequences, tiny_config, tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
# A layer: query and output 4 x 4, key and value 4 x 2, gate, up and down 4 x 6: 16 + 16 + 8 + 8 + 72 = 120 numbers.
# Attention: queries and values of 2 heads of 2, so 6 * (4 + 4) = 48 for each pair and layer.
BY_HAND = StepFlops(per_token=6 * 240, per_prediction=6 * 40, per_pair=((None, 96),))


def sequence(number: int, token_ids: list[int], num_trained: int) -> TrainSequence:
    (one,) = random_sequences(1, len(token_ids))
    mask = np.arange(len(token_ids)) >= len(token_ids) - num_trained
    return replace(one, sequence_id=number, token_ids=np.array(token_ids, np.int32), loss_mask=mask)


@pytest.mark.parametrize("tied", [True, False])
def test_the_costs_of_a_model_are_those_worked_by_hand(tied: bool):
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied))
    assert StepFlops.of_model(model) == BY_HAND
    # A frozen matrix has no gradient of its own.
    frozen = StepFlops(per_token=4 * 240, per_prediction=4 * 40, per_pair=((None, 96),))
    assert StepFlops.of_model(model.requires_grad_(False)) == frozen


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


def test_the_peak_of_a_device_is_found_by_its_name():
    # One name begins as the other does.
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("of nobody", None)):
        assert peak_flops_per_s(name, torch.bfloat16) == peak
        assert peak_flops_per_s(name, torch.float32) is None


def test_layers_with_a_window_have_no_work_that_grows_with_the_square():
    # One of the two layers has a window; all else is alike.
    whole, half = (StepFlops.of_model(build(name)) for name in ("Qwen 2", "Qwen 2, windows"))
    ((_, of_both),) = whole.per_pair
    assert half.per_pair == ((None, of_both / 2), (8, of_both / 2))
    assert half.work == whole.work._replace(pair=whole.work.pair / 2)


def test_attention_and_head_count_in_units_of_a_tokens_products_in_the_layers():
    costs = StepFlops(per_token=400.0, per_prediction=100.0, per_pair=((None, 8.0), (16, 80.0)))
    assert costs.work == Work(prediction=0.25, pair=0.02)


@pytest.mark.parametrize("name", ["Gemma 4", "GPT-2", "Mamba", "Nemotron-H"])
def test_models_of_other_shapes_have_a_finite_work(name: str):
    assert 0 < sum(StepFlops.of_model(build(name)).work) < 1


def test_a_step_reports_its_phases_operations_and_memory(tmp_path: Path):
    engine = engine_of(tiny_config(tmp_path, tiny_model(tmp_path / "model"), learner={"max_tokens": 64}))
    one, two = (engine.update(random_sequences(n, 24), version=0).cost for n in (3, 6))
    assert one is not None
    assert two is not None
    assert one.phase_s.keys() == two.phase_s.keys() == {"pack", "scatter", "forward", "backward", "optimizer"}
    assert min(one.phase_s.values()) > 0
    assert two.flops == pytest.approx(2 * one.flops)
    assert one.peak_flops_per_s is None
    assert one.peak_memory_bytes > 1e6


def test_the_highest_memory_is_not_forgotten_when_a_step_reads_its_own(monkeypatch: pytest.MonkeyPatch):
    # What torch counts: 60 at the peak of a step, and 2 that stay allocated after it.
    counted = {"peak": 60, "now": 2}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counted["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counted.update(peak=counted["now"]))
    monkeypatch.setitem(phases._highest_bytes, "cuda", 0)
    device = torch.device("cuda")
    assert phases.highest_memory_bytes(device) == 60
    assert phases.peak_memory_bytes(device) == 60
    assert phases.highest_memory_bytes(device) == 60
    assert phases.peak_memory_bytes(device) == 2
    assert phases.highest_memory_bytes(device) == 60
    counted["peak"] = 70
    assert phases.highest_memory_bytes(device) == 70
