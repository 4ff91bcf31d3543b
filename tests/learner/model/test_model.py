"""What ``load_model`` refuses, and what a policy computes and where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from async_rl.config.learner import ModelConfig
from async_rl.data.chat import check_model
from async_rl.errors import ModelError
from async_rl.learner.data.packing import pack
from async_rl.learner.model.policy_model import PolicyModel, head_dtype, load_model, to_device
from tests.families.catalogue import build
from tests.learner.model.logits_rows import LogitsRows
from tests.learner.tiny import random_sequences, tiny_model
from tests.scorer.test_reward_model import write_reward_model

CPU = torch.device("cpu")


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="no directory"):
        load_model(ModelConfig(path=str(tmp_path / "nothing")))


def test_a_directory_without_weights_is_refused(tmp_path: Path):
    tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="can't load a causal LM"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_missing_weights_are_refused_by_name_instead_of_drawn_at_random(tmp_path: Path):
    tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors: model\.norm\.weight"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_the_list_of_layers_is_found_by_its_usual_names():
    for name, where in (("Llama", "layers"), ("GPT-2", "h"), ("OPT", "decoder.layers"), ("MPT", "blocks")):
        model = PolicyModel(build(name), "padded")
        assert (model.layers_name, len(model.decoder_layers)) == (where, 2)
    with pytest.raises(ModelError, match=r"HrmTextForCausalLM, at one of layers, h, .*L_module\.layers"):
        _ = PolicyModel(build("HRM"), "padded").decoder_layers


def test_a_model_that_changes_its_own_weights_is_refused(tmp_path: Path):
    build("RWKV, rescaled").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="set rescale_every = 0 in config"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_head_that_is_more_than_one_linear_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_model(tmp_path)
    from transformers import Qwen2ForCausalLM

    monkeypatch.setattr(Qwen2ForCausalLM, "get_output_embeddings", lambda self: nn.Sequential(self.lm_head, nn.Tanh()))
    with pytest.raises(ModelError, match=r"one nn\.Linear, got Sequential"):
        load_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("quantized", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, 8),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "fp8"}, 4),
        ("fp8", 4),
    ],
)
def test_a_quantised_model_names_the_key_that_quantises_one(tmp_path: Path, quantized: Any, bits: int):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantized}))
    with pytest.raises(ModelError, match=f"lora.base_bits = {bits} with lora.rank"):
        check_model(tmp_path)


@pytest.mark.parametrize("is_nested", [False, True])
def test_quantised_weights_are_refused_by_the_name_of_their_method_before_they_are_read(
    tmp_path: Path, is_nested: bool
):
    tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    config |= {"text_config": quantised} if is_nested else quantised
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    for check in (lambda: load_model(ModelConfig(path=str(tmp_path))), lambda: check_model(tmp_path)):
        with pytest.raises(ModelError, match=r"model.path: .* quantization_config \(gptq\).* the unquantised model"):
            check()


@pytest.mark.parametrize(
    ("head", "dtype", "is_fit"),
    [
        ("float32", "auto", False), ("float32", "bfloat16", False), ("bfloat16", "float32", False),
        ("float32", "float32", True), ("model", "auto", True), (None, "bfloat16", True),
    ],
)  # fmt: skip
def test_a_head_of_a_precision_of_its_own_is_refused(tmp_path: Path, head: str | None, dtype: Any, is_fit: bool):
    tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"head_dtype": head}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_fit:
        check_model(tmp_path, dtype=dtype)
        return
    for check in (
        lambda: load_model(ModelConfig(path=str(tmp_path), dtype=dtype)),
        lambda: check_model(tmp_path, dtype=dtype),
    ):
        with pytest.raises(ModelError, match=rf'has head_dtype = \'{head}\'.* set model.dtype = "float32"'):
            check()


def test_a_reward_model_is_no_policy_though_its_decoder_has_an_embedding_as_its_head(tmp_path: Path):
    write_reward_model(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="got Qwen2ForSequenceClassification; choose the causal LM that it was made"):
        load_model(ModelConfig(path=str(tmp_path)))
    load_model(ModelConfig(path=str(tmp_path)), "value")


def test_master_weights_are_float32_whatever_the_file_holds(tmp_path: Path):
    tiny_model(tmp_path)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(ModelConfig(path=str(tmp_path)))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_packed_logprobs_are_those_of_each_sequence_alone_at_its_temperature(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    tiny_model(tmp_path)
    policy = PolicyModel(load_model(ModelConfig(path=str(tmp_path))))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sequences = random_sequences(4, 12, spread=5)
    ((micro_batch,),) = pack(sequences, max_tokens=1000, num_ranks=1)
    batch = to_device(micro_batch, CPU)
    scored = policy(replace(batch, temperatures=batch.temperatures * 0.7))
    for place, sequence_id in enumerate(micro_batch.sequence_ids):
        sequence = sequences[sequence_id]
        token_ids = torch.from_numpy(sequence.token_ids).long()
        with torch.no_grad():
            logprobs_TV = (plain(input_ids=token_ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        chosen = torch.from_numpy(np.flatnonzero(sequence.loss_mask) - 1)
        mine = torch.from_numpy(np.flatnonzero(micro_batch.sequence_index == place))
        torch.testing.assert_close(
            scored.logprobs[mine], logprobs_TV[chosen, token_ids[chosen + 1]], atol=1e-5, rtol=1e-5
        )
        entropies = -(logprobs_TV.exp() * logprobs_TV).sum(-1)[chosen]
        torch.testing.assert_close(scored.entropies[mine], entropies, atol=1e-5, rtol=1e-5)


def test_the_head_runs_only_where_there_is_a_loss(tmp_path: Path):
    tiny_model(tmp_path)
    policy = PolicyModel(load_model(ModelConfig(path=str(tmp_path))))
    ((micro_batch,),) = pack(random_sequences(2, 12), max_tokens=1000, num_ranks=1)
    batch = to_device(micro_batch, CPU)
    with LogitsRows(policy.vocab_size) as rows:
        policy(batch)
    # Two sequences of 12 tokens, the last 8 of each trained on.
    assert rows.seen == [16]


def test_a_float32_head_does_not_round_the_logits_of_a_bfloat16_model(tmp_path: Path):
    tiny_model(tmp_path)
    config = ModelConfig(path=str(tmp_path), head_dtype="float32")
    policy = PolicyModel(load_model(config), head_dtype=head_dtype(config)).bfloat16()
    ((micro_batch,),) = pack(random_sequences(2, 12), max_tokens=1000, num_ranks=1)
    batch = to_device(micro_batch, CPU)
    hidden = policy.hidden_states(batch)[batch.predict_index].double()
    weight = cast(nn.Linear, policy.causal_lm.get_output_embeddings()).weight.double()
    exact = (hidden @ weight.T).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(policy(batch).logprobs, exact.float(), rtol=1e-6, atol=1e-6)
    policy.head_dtype = None
    assert (policy(batch).logprobs - exact).abs().max() > 1e-5
