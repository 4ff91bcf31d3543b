"""Models that can't be packed are trained in padded rows: their steps equal those of each sequence alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.errors import ModelError
from async_rl.extensions.offline.sft import SupervisedObjective
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.model.packing_choice import choose_packing
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.model.families import CONVOLUTION, LONGROPE, STATEFUL, WINDOW, causal_lm
from tests.learner.rank_scenarios import padded_config, save, sequences_with_a_group, with_reference
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_model, trained_tokens

Tensors = dict[str, Tensor]

TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    **STATEFUL,
    "zamba 2, shared layers": (
        "Zamba2", {**STATEFUL["zamba 2"][1], "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    ),
    "lfm2": ("Lfm2", CONVOLUTION),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8, **WINDOW}),
    "minimax": (
        "MiniMax", {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 4},
    ),
}  # fmt: skip


def write_model(root: Path, name: str) -> Path:
    """A tiny model of this family, with a tokenizer, in ``root / "model"``."""
    tiny_model(root / "model")
    causal_lm(*TRAINED[name]).save_pretrained(root / "model")
    return root / "model"


def make_engine(root: Path, **sections: Any) -> FsdpEngine:
    config = padded_config(root, sections)
    return FsdpEngine(config, init_ranks(config))


def gradient_of(engine: FsdpEngine, sequences: list[TrainSequence], directory: Path) -> Tensors:
    """The gradient of one step: with beta1 = 0 it is AdamW's first moment."""
    stats = engine.update(sequences, version=0)
    assert stats.stepped
    assert (stats.padded_cost is not None) == (engine.policy.model.packing == "padded")
    save(engine, directory, 1)
    tensors = load_tensors(directory, OPTIMIZER)
    return {n.removeprefix("exp_avg."): tensor for n, tensor in tensors.items() if n.startswith("exp_avg.")}


def alone(
    directory: Path, sequences: list[TrainSequence], attention: str = "eager"
) -> tuple[dict[int, Tensor], Tensors]:
    """Logprobs and gradients of transformers' own model, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()
    scores: dict[int, Tensor] = {}
    for sequence in sequences:
        token_ids, mask = torch.from_numpy(sequence.token_ids).long(), torch.from_numpy(sequence.loss_mask[1:])
        logprobs = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        logprobs = logprobs.gather(-1, token_ids[1:, None])[:, 0][mask]
        scores[sequence.sequence_id] = logprobs.detach()
        ratio = (logprobs - torch.from_numpy(sequence.behavior_logprobs[1:])[mask]).exp()
        advantages = torch.from_numpy(sequence.advantages[1:])[mask]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        (loss.sum() / trained_tokens(sequences)).backward()
    return scores, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_near(ours: Tensors, expected: Tensors) -> None:
    """Within 1e-5 of the largest gradient of all."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-5, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(not bool(ours[name].any()) for name in ours.keys() - expected.keys())


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_step_in_padded_rows_equals_that_of_each_sequence_alone(tmp_path: Path, name: str):
    model = write_model(tmp_path, name)
    sequences = sequences_with_a_group()
    engine = make_engine(tmp_path)
    engine.self_test()
    scores, expected = alone(model, sequences)
    found = engine.score(sequences, of="policy")
    for sequence_id, logprobs in scores.items():
        np.testing.assert_allclose(found[sequence_id], logprobs, rtol=1e-5)
    assert_near(gradient_of(engine, sequences, tmp_path / "ours"), expected)
    recomputed = make_engine(tmp_path, model={"gradient_checkpointing": "full"}, learner={"max_tokens": 4096})
    assert_near(gradient_of(recomputed, sequences, tmp_path / "recomputed"), expected)


SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("Granite", {"logits_scaling": 8.0}),
    "cohere2": ("Cohere2", {"logit_scale": 0.0625, **WINDOW}),
    "granite 4 hybrid": ("GraniteMoeHybrid", {**STATEFUL["granite 4 hybrid"][1], "logits_scaling": 6.0}),
    "falcon h1": ("FalconH1", {**STATEFUL["falcon h1"][1], "lm_head_multiplier": 0.04}),
    "nanochat, capped": ("NanoChat", {"final_logit_softcapping": 0.05}),
    "gemma 2, capped": (
        "Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.05,
                   "final_logit_softcapping": 0.05, "initializer_range": 0.2, **WINDOW},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_logits_that_a_model_scales_after_its_head_are_scaled(tmp_path: Path, name: str):
    tiny_model(tmp_path / "model")
    causal_lm(*SCALED[name]).save_pretrained(tmp_path / "model")
    sequences = sequences_with_a_group()
    engine = make_engine(tmp_path)
    scores, expected = alone(tmp_path / "model", sequences)
    found = engine.score(sequences, of="policy")
    for sequence_id, logprobs in scores.items():
        np.testing.assert_allclose(found[sequence_id], logprobs, rtol=1e-5)
    assert_near(gradient_of(engine, sequences, tmp_path / "ours"), expected)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"model": {"gradient_checkpointing": "full"}},
    "recomputed in part": {"model": {"gradient_checkpointing": "selective"}},
    "adapters": {"lora": {"rank": 4}, "loss": {"preset": "grpo", "kl_coef": 0.1}},
    "reference": {"loss": {"kl_coef": 0.1, "kl_placement": "loss"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_ordinary_model_takes_the_same_step_packed_and_padded(tmp_path: Path, variant: str):
    tiny_model(tmp_path / "model")
    gradients: dict[str, Tensors] = {}
    for packing in ("packed", "padded"):
        engine = make_engine(tmp_path, **VARIANTS[variant], learner={"packing": packing})
        sequences = sequences_with_a_group()
        if "loss" in VARIANTS[variant]:
            sequences = with_reference(engine, sequences)
        gradients[packing] = gradient_of(engine, sequences, tmp_path / packing)
    assert_near(gradients["padded"], gradients["packed"])


def test_supervised_steps_are_the_same_packed_and_padded(tmp_path: Path):
    tiny_model(tmp_path / "model")
    gradients: dict[str, Tensors] = {}
    for packing in ("packed", "padded"):
        config = padded_config(tmp_path, {"learner": {"packing": packing}, "sft": {"max_length": 64}})
        engine = FsdpEngine(config, init_ranks(config), objective=SupervisedObjective())
        gradients[packing] = gradient_of(engine, sequences_with_a_group(), tmp_path / packing)
    assert_near(gradients["padded"], gradients["packed"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3 next", "mamba 2", "lfm2", "granite 4 hybrid", "zamba 2, shared layers"])
def test_two_ranks_take_the_step_of_one_in_padded_rows(tmp_path: Path, name: str):
    model = write_model(tmp_path, name)
    run_ranks("padded", tmp_path)
    _, expected = alone(model, sequences_with_a_group())
    tensors = load_tensors(tmp_path / "ranks_2", OPTIMIZER)
    assert_near({n.removeprefix("exp_avg."): t for n, t in tensors.items() if n.startswith("exp_avg.")}, expected)


def test_auto_prefers_packed_rows_and_says_why_it_pads(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "async_rl")
    assert choose_packing(PolicyModel(causal_lm("Llama", {}), "padded"), "auto", max_length=64) == "packed"
    assert not caplog.records
    policy = PolicyModel(causal_lm(*TRAINED["lfm2"]), "padded")
    assert choose_packing(policy, "auto", max_length=64) == policy.packing == "padded"
    (record,) = caplog.records
    assert "Lfm2ForCausalLM can't be trained on packed rows: the output of layers.0.conv" in record.getMessage()


def test_packed_rows_refuse_and_name_padded_rows_where_these_would_do():
    for name in ("lfm2", "mamba 2"):
        policy = PolicyModel(causal_lm(*TRAINED[name]), "padded")
        with pytest.raises(ModelError, match=r'or set learner\.packing = "padded", with which this model can be'):
            choose_packing(policy, "packed", max_length=64)


@pytest.mark.parametrize("setting", ["auto", "packed"])
def test_a_model_that_fits_neither_is_refused_with_both_reasons(setting: Any):
    settings = {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}
    policy = PolicyModel(causal_lm("Phi3", settings), "padded")
    both = r'on packed rows: its longrope .* with learner\.packing = "padded": .* on padded rows: its longrope'
    with pytest.raises(ModelError, match=both):
        choose_packing(policy, setting, max_length=64)
