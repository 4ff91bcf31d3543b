"""Adapters, on frozen weights of 32, 16, 8 and 4 bits: only they are trained and saved; what is published, scored and
exported is the model they make.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from async_rl.errors import ConfigError, ModelError, RunError
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_adapter, export_checkpoint
from async_rl.learner.model import quantized
from async_rl.learner.model.lora import merge
from async_rl.learner.model.quantized import QuantizedLinear, check_kernels
from tests.learner.model.reference import engine_of, plain_model, plain_scores, saved
from tests.learner.rank_scenarios import adapted_config, batch_for, save, with_reference
from tests.learner.tiny import tiny_config, tiny_model

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
TOKEN_IDS = torch.arange(4, 20)[None]
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("lora") / "model", **WIDE).parent


def make_engine(root: Path, **variant: Any) -> FsdpEngine:
    return engine_of(adapted_config(root, variant))


def weights_of(engine: FsdpEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.gather()}


def test_a_merged_weight_is_w_plus_scale_times_b_a():
    # B A = [[1], [2]] [[3, 4]] = [[3, 4], [6, 8]]; scale 0.5; W = ones.
    weight, a, b = torch.ones(2, 2), torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0], [2.0]])
    torch.testing.assert_close(merge(weight, a, b, scale=0.5), torch.tensor([[2.5, 3.0], [4.0, 5.0]]))


def test_adapters_begin_as_no_change_and_publish_the_names_of_a_full_run(directory: Path):
    stored = load_file(directory / "model" / "model.safetensors")
    published = weights_of(make_engine(directory))
    full = engine_of(tiny_config(directory, "model"))
    assert list(published) == [name for name, _ in full.gather()]
    assert all(torch.equal(published[name], tensor) for name, tensor in stored.items())


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The layers whose weights differ, by the last part of their names."""
    return {n.rpartition(".")[0].rpartition(".")[2] for n in before if not torch.equal(before[n], after[n])}


@pytest.mark.parametrize(
    ("shape", "lora"),
    [
        ({}, {}), ({"tied": False}, {"rank_stabilized": True}), (WIDE, {"base_bits": 4}), (WIDE, {"base_bits": 8}),
    ],
)  # fmt: skip
def test_what_is_published_and_exported_is_the_model_with_adapters(
    tmp_path: Path, shape: dict[str, Any], lora: dict[str, Any]
):
    from peft import PeftModel

    tiny_model(tmp_path / "model", **shape)
    engine = make_engine(tmp_path, lora=lora)
    before = weights_of(engine)
    engine.update(with_reference(engine, batch_for(0)), version=0)
    published = weights_of(engine)
    assert moved(before, published) == PROJECTIONS
    model = plain_model(tmp_path / "model", published)
    scores, apart = engine.score(batch_for(0), of="policy"), engine.score(batch_for(0), of="reference")
    for sequence in batch_for(0):
        own = scores[sequence.sequence_id]
        np.testing.assert_allclose(own, plain_scores(model, sequence)[0].detach(), atol=1e-5, rtol=0)
        assert np.abs(own - apart[sequence.sequence_id]).max() > 1e-2, "the step must be large enough to be seen"
    saved(engine, tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    exported = plain_model(tmp_path / "merged").state_dict()
    for name, tensor in published.items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=0)
    if "base_bits" not in lora:
        export_adapter(tmp_path / "saved", tmp_path / "adapter")
        adapted: Any = PeftModel.from_pretrained(plain_model(tmp_path / "model"), tmp_path / "adapter")
        torch.testing.assert_close(adapted(TOKEN_IDS).logits, model(TOKEN_IDS).logits, atol=1e-5, rtol=0)


def test_only_adapters_are_trained_and_saved(directory: Path, tmp_path: Path):
    engine, first = make_engine(directory), tmp_path / "first"
    engine.update(with_reference(engine, batch_for(0)), version=0)
    save(engine, first, 1)
    # Two layers of seven projections, A and B each.
    adapters = load_tensors(first)
    assert len(adapters) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in adapters)
    assert {tuple(t.shape) for n, t in adapters.items() if "q_proj" in n} == {(4, 64), (64, 4)}
    moments = load_tensors(first, OPTIMIZER)
    assert {name.partition(".")[2] for name in moments} == set(adapters)
    assert sum(p.numel() for p in engine.policy.parameters.values()) == sum(t.numel() for t in adapters.values())


def test_frozen_weights_are_kept_in_the_dtype_they_compute_in_and_adapters_in_float32(directory: Path):
    engine = make_engine(directory, model={"dtype": "bfloat16"})
    dtypes = {p.requires_grad: p.dtype for p in engine.policy.model.parameters()}
    engine.close()
    assert dtypes == {False: torch.bfloat16, True: torch.float32}


def test_the_reference_is_the_model_without_adapters_and_no_second_one_is_loaded(directory: Path):
    engine = make_engine(directory)
    assert engine.policy.reference is None
    config = tiny_config(directory, "model")
    untrained = engine_of(config).score(batch_for(0), of="policy")
    engine.update(with_reference(engine, batch_for(0)), version=0)
    for sequence_id, logprobs in engine.score(batch_for(0), of="reference").items():
        np.testing.assert_allclose(logprobs, untrained[sequence_id], atol=1e-6, rtol=0)


def test_another_reference_may_be_named(directory: Path):
    tiny_model(directory / "other", seed=5)
    engine = make_engine(directory, loss={"preset": "grpo", "kl_coef": 0.1, "kl_reference": str(directory / "other")})
    (sequence,) = batch_for(0)[:1]
    expected, _ = plain_scores(plain_model(directory / "other"), sequence)
    np.testing.assert_allclose(engine.score([sequence], of="reference")[0], expected.detach(), atol=1e-5, rtol=0)


def test_adapters_without_their_model_and_a_full_checkpoint_without_adapters_are_not_exported(tmp_path: Path):
    tiny_model(tmp_path / "model")
    save(make_engine(tmp_path), tmp_path / "adapters", 1)
    config = tiny_config(tmp_path, "model")
    save(engine_of(config), tmp_path / "full", 1)
    for name in ("adapters", "full"):
        write_manifest(tmp_path / name)
    with pytest.raises(RunError, match=r"expected a checkpoint of adapters \(lora.rank\)"):
        export_adapter(tmp_path / "full", tmp_path / "out")
    tiny_model(tmp_path / "model", seed=1)
    with pytest.raises(RunError, match=r"belong to other weights .* put the model back that the run began with"):
        export_checkpoint(tmp_path / "adapters", tmp_path / "out")
    with pytest.raises(RunError, match=r"belong to other weights"):
        make_engine(tmp_path).load(tmp_path / "adapters")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ModelError, match="holds adapters only, and the model that they belong to is gone"):
        export_checkpoint(tmp_path / "adapters", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lm_head", "lm_head is not in a decoder layer"),
        ("embed_tokens", "model.embed_tokens is not in a decoder layer"),
        ("input_layernorm", r"expected linear layers, but model.layers.0.input_layernorm is a Qwen2RMSNorm"),
        ("qkv_proj", r"Qwen2ForCausalLM has no layer named 'qkv_proj'; .* q_proj, up_proj, v_proj"),
    ],
)
def test_targets_that_can_have_no_adapter_are_refused_by_name(directory: Path, target: str, message: str):
    config = tiny_config(directory, "model", lora={"rank": 2, "targets": ["q_proj", target]})
    with pytest.raises(ModelError, match=f"lora.targets: .*{message}"):
        engine_of(config)


def test_targets_are_last_parts_of_names(tmp_path: Path):
    for targets in ([], ["self_attn.q_proj"], ["q_proj", "q_proj"], [""]):
        with pytest.raises(ConfigError, match=r"lora.targets"):
            tiny_config(tmp_path, "model", lora={"rank": 2, "targets": targets})


def test_eight_bits_keep_each_row_to_a_127th_of_its_largest_weight():
    # Scales 1.27 / 127 = 0.01 and 2.54 / 127 = 0.02: 0.304 becomes 30 * 0.01, and 0.05 becomes 2 * 0.02 (2.5 to even).
    layer = QuantizedLinear(torch.tensor([[1.27, 0.304], [-2.54, 0.0501]]), None, bits=8, device=CPU)
    expected = torch.tensor([[1.27, 0.30], [-2.54, 0.06]])
    torch.testing.assert_close(layer.dequantized(torch.float32), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_and_its_gradient_are_those_of_the_weights_that_it_stands_for(bits: int):
    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(24), requires_grad=False)
    weight = 0.1 * torch.randn(24, 64)
    layer = QuantizedLinear(weight, bias, bits=bits, device=CPU)
    # 4 bits: 0.152 of a block's largest weight, the widest half gap of NF4; 8 bits: half of a 127th.
    worst = weight.abs().amax(1, keepdim=True) * (0.153 if bits == 4 else 0.5 / 127 + 1e-6)
    stored = layer.dequantized(torch.float32)
    assert bool(((stored - weight).abs() <= worst).all())
    x = torch.randn(3, 64, requires_grad=True)
    out = layer(x)
    torch.testing.assert_close(out, x @ stored.T + bias)
    (gradient,) = torch.autograd.grad((out**2).sum(), x)
    torch.testing.assert_close(gradient, 2 * out.detach() @ stored)
    assert layer.state_dict().keys() == {"bias"}


def test_only_the_decoders_linear_layers_are_quantised_and_they_take_less_memory(directory: Path):
    engines = [make_engine(directory, lora=lora) for lora in ({}, {"base_bits": 4})]
    plain, four = map(weights_of, engines)
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, four[name])}
    assert changed == {n for n in plain if ".layers." in n and n.endswith("proj.weight")}
    layers = [m for m in engines[1].policy.model.modules() if isinstance(m, QuantizedLinear)]
    # Half a byte for each weight, and four bytes for 64 of them.
    assert sum(b.nbytes for m in layers for b in m.buffers()) == sum(
        m.in_features * m.out_features * (0.5 + 4 / 64) for m in layers
    )
    assert engines[1].policy.flops.per_token == engines[0].policy.flops.per_token


def test_what_a_device_or_a_machine_lacks_is_refused_by_name(directory: Path, monkeypatch: pytest.MonkeyPatch):
    class WithoutKernels:
        @staticmethod
        def quantize_4bit(*_: object, **__: object) -> None:
            raise NotImplementedError("no kernel registered")

    with monkeypatch.context() as patched:
        patched.setattr(quantized, "_bitsandbytes", lambda: WithoutKernels)
        with pytest.raises(
            ModelError, match=r"lora\.base_bits = 4: expected .* a kernel for cpu in bfloat16, got none"
        ):
            check_kernels(4, torch.bfloat16, CPU)
        check_kernels(8, torch.bfloat16, CPU)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"can't be imported here .*: pip install 'async-rl\[quantized\]'"):
        make_engine(directory, lora={"base_bits": 4})


def test_a_quantised_base_needs_adapters(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"lora\.base_bits: expected no value without lora\.rank"):
        tiny_config(tmp_path, "model", lora={"base_bits": 4})
