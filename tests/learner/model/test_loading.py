"""A model that is read tensor by tensor or as a whole: its values, what is refused, and what it computes where."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from async_rl.config.learner import ModelConfig
from async_rl.data.chat import check_model
from async_rl.errors import ModelError
from async_rl.learner.data.packing import pack
from async_rl.learner.model.loading import load_policy, open_model, read_tested
from async_rl.learner.model.policy_model import PolicyModel, head_dtype, load_model, to_device
from tests.families.catalogue import build
from tests.learner.loaded import MB, write_model
from tests.learner.model.logits_rows import LogitsRows
from tests.learner.ranks import run_ranks
from tests.learner.tiny import random_sequences, tiny_model
from tests.scorer.test_reward_model import write_reward_model

CPU = torch.device("cpu")
# Tied and untied heads, buffers that no file has, transposed matrices, renamed tensors, layers of several kinds;
# experts that are stacked, and a bias of theirs that gets no gradient.
FAMILIES = (
    "Llama", "Qwen 3", "Gemma 3", "GPT-2", "OPT, projected", "BLOOM", "Mamba 2", "Qwen 3.5", "Falcon-H1",
    "Qwen 3 MoE", "Mixtral", "AFMoE",
)  # fmt: skip


def of(directory: Path) -> ModelConfig:
    return ModelConfig(path=str(directory))


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_read_one_by_one_are_those_that_transformers_loads(tmp_path: Path, family: str):
    build(family).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    policy, weights = load_policy(of(tmp_path), "padded", is_sharded=True)
    assert weights is not None
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    weights.fill(policy, torch.device("cpu"))
    expected = load_model(of(tmp_path))
    assert {p.dtype for p in expected.parameters()} == {torch.float32}  # the master weights, whatever the file holds
    ours = tensors(policy.causal_lm)
    assert ours.keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].requires_grad == tensor.requires_grad, name
    assert len(list(policy.parameters())) == len(list(expected.parameters()))


def test_a_model_that_transformers_converts_or_with_a_tensor_that_is_stored_twice_is_loaded_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    build("OLMo hybrid").save_pretrained(tmp_path / "converted")
    file = tiny_model(tmp_path / "twice", tied=True) / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"] + 1}, file, {"format": "pt"})
    with caplog.at_level(logging.INFO, "async_rl"):
        for name in ("converted", "twice"):
            model, weights = open_model(of(tmp_path / name))
            assert (weights, model.lm_head.weight.device.type) == (None, "cpu")
    assert "the whole model is loaded on every rank before it is sharded, because transformers converts" in caplog.text
    assert "lm_head.weight is stored, but shares its values with another tensor" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "another shape", "no file", "cut"])
def test_unfit_weights_are_refused_as_transformers_refuses_them(tmp_path: Path, damage: str):
    file = tiny_model(tmp_path) / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    stored = load_file(file)
    match damage:
        case "missing":
            save_file({key: tensor for key, tensor in stored.items() if key != name}, file, {"format": "pt"})
        case "another shape":
            save_file(stored | {name: stored[name][:-1].clone()}, file, {"format": "pt"})
        case "no file":
            file.unlink()
        case _:
            file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError) as whole:
        load_model(of(tmp_path))
    with pytest.raises(ModelError) as in_parts:
        open_model(of(tmp_path))
    assert str(in_parts.value) == str(whole.value)
    assert f"lack 1 tensors: {name}" in str(whole.value) or damage != "missing"


def test_the_self_test_reads_only_the_layers_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from async_rl.learner.model import self_test

    tiny_model(tmp_path, num_hidden_layers=4)
    policy, weights = load_policy(of(tmp_path), "padded", is_sharded=True)
    assert len(read_tested(of(tmp_path), policy, weights).decoder_layers) == 4
    monkeypatch.setattr(self_test, "_FEW_PARAMETERS", 0)
    tested = read_tested(of(tmp_path), policy, weights)
    assert len(tested.decoder_layers) == 1
    expected = tensors(load_model(of(tmp_path)))
    for name, tensor in tensors(tested.causal_lm).items():
        assert torch.equal(tensor, expected[name]), name
    assert {p.device.type for p in policy.parameters()} == {"meta"}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}], ids=["shards", "tensor"])
def test_a_rank_needs_memory_for_its_part_and_a_group(tmp_path: Path, parallel: dict[str, int]):
    # 59 million parameters: 236 MB in float32, of which a rank holds 118. Its largest group has 17 million.
    num_bytes, group_bytes = write_model(tmp_path / "model", 236 * MB, vocabulary=128)
    (tmp_path / "parallel.json").write_text(json.dumps(parallel))
    run_ranks("loading", tmp_path)
    grown = [json.loads((tmp_path / f"growth_{rank}.json").read_text()) for rank in (0, 1)]
    assert max(grown) < num_bytes / 2 + group_bytes + 30 * MB < num_bytes


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="no directory"):
        load_model(ModelConfig(path=str(tmp_path / "nothing")))


def test_a_head_that_is_more_than_one_linear_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_model(tmp_path)
    from transformers import Qwen2ForCausalLM

    monkeypatch.setattr(Qwen2ForCausalLM, "get_output_embeddings", lambda self: nn.Sequential(self.lm_head, nn.Tanh()))
    with pytest.raises(ModelError, match=r"one nn\.Linear, got Sequential"):
        load_model(ModelConfig(path=str(tmp_path)))


def edit_config(directory: Path, **settings: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


def assert_refused(directory: Path, message: str, **settings: Any) -> None:
    """Both by the learner that loads the model, and by a check of its files alone."""
    for check in (
        lambda: load_model(ModelConfig(path=str(directory), **settings)),
        lambda: check_model(directory, **settings),
    ):
        with pytest.raises(ModelError, match=message):
            check()


@pytest.mark.parametrize(
    ("quantized", "method", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "bitsandbytes", 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes", 8),
        ({"quant_method": "gptq", "bits": 8}, "gptq", 8),
        ("fp8", "fp8", 4),
    ],
)
def test_a_quantised_model_is_refused_before_it_is_read_and_the_key_is_named_that_quantises_one(
    tmp_path: Path, quantized: Any, method: str, bits: int
):
    (tiny_model(tmp_path) / "model.safetensors").unlink()
    edit_config(tmp_path, quantization_config=quantized)
    assert_refused(tmp_path, rf"quantization_config.*{method}.* lora.base_bits = {bits} with lora.rank")


def test_a_quantised_model_is_found_in_the_config_of_its_text_model(tmp_path: Path):
    edit_config(tiny_model(tmp_path), text_config={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert_refused(tmp_path, r"model.path: .* quantization_config \(gptq\).* the unquantised model")


@pytest.mark.parametrize(
    ("head", "dtype", "is_fit"),
    [
        ("float32", "auto", False), ("bfloat16", "float32", False), ("float32", "float32", True),
        ("model", "auto", True), (None, "bfloat16", True),
    ],
)  # fmt: skip
def test_a_head_of_a_precision_of_its_own_is_refused(tmp_path: Path, head: str | None, dtype: Any, is_fit: bool):
    edit_config(tiny_model(tmp_path), head_dtype=head)
    if is_fit:
        check_model(tmp_path, dtype=dtype)
    else:
        assert_refused(tmp_path, rf'has head_dtype = \'{head}\'.* set model.dtype = "float32"', dtype=dtype)


def test_a_reward_model_is_no_policy_though_its_decoder_has_an_embedding_as_its_head(tmp_path: Path):
    write_reward_model(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="got Qwen2ForSequenceClassification; choose the causal LM that it was made"):
        load_model(ModelConfig(path=str(tmp_path)))
    load_model(ModelConfig(path=str(tmp_path)), "value")


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
