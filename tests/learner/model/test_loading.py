"""A model that is read tensor by tensor: the same values as transformers loads, on less memory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.config.learner import ModelConfig
from async_rl.errors import ModelError
from async_rl.learner.model.loading import load_policy, open_model, read_tested
from async_rl.learner.model.policy_model import load_model
from tests.families.catalogue import build
from tests.learner.loaded import MB, write_model
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_model

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
    build(family).save_pretrained(tmp_path, max_shard_size="20KB")
    policy, weights = load_policy(of(tmp_path), "padded", is_sharded=True)
    assert weights is not None
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    weights.fill(policy, torch.device("cpu"))
    expected = load_model(of(tmp_path))
    ours = tensors(policy.causal_lm)
    assert ours.keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].requires_grad == tensor.requires_grad, name
    assert len(list(policy.parameters())) == len(list(expected.parameters()))


def test_a_model_that_transformers_converts_is_loaded_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    build("OLMo hybrid").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "async_rl"):
        model, weights = open_model(of(tmp_path))
    assert (weights, model.lm_head.weight.device.type) == (None, "cpu")
    assert "the whole model is loaded on every rank before it is sharded, because transformers converts" in caplog.text


def test_a_tensor_that_is_stored_twice_is_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tiny_model(tmp_path, tied=True) / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"] + 1}, file, {"format": "pt"})
    with caplog.at_level(logging.INFO, "async_rl"):
        assert open_model(of(tmp_path))[1] is None
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
