"""Frozen weights in 4 and 8 bits: adapters train on them, and what is published is what the learner computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from async_rl.errors import ConfigError, ModelError
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_checkpoint
from async_rl.learner.model import quantized
from async_rl.learner.model.quantized import QuantizedLinear, check_kernels
from async_rl.learner.ranks import init_ranks
from tests.learner.model.test_lora import plain_model, plain_scores
from tests.learner.rank_scenarios import LORA, batch_for, save, with_reference
from tests.learner.tiny import tiny_config, tiny_model

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantized")
    tiny_model(root / "model", **SHAPE)
    return root


def make_engine(root: Path, bits: int | None, **variant: Any) -> FsdpEngine:
    lora = LORA | ({} if bits is None else {"base_bits": bits})
    loss = {"preset": "grpo", "kl_coef": 0.1}
    config = tiny_config(root, "model", lora=lora, loss=loss, optimizer={"lr": 1e-2}, **variant)
    return FsdpEngine(config, init_ranks(config))


def weights_of(engine: FsdpEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.gather()}


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


@pytest.mark.parametrize("bits", [4, 8])
def test_published_weights_give_the_logprobs_of_the_quantised_model_with_adapters(
    root: Path, tmp_path: Path, bits: int
):
    engine = make_engine(root, bits)
    before = weights_of(engine)
    engine.update(with_reference(engine, batch_for(0)), version=0)
    published = weights_of(engine)
    moved = {n.rpartition(".")[0].rpartition(".")[2] for n, t in published.items() if not torch.equal(t, before[n])}
    assert moved == set(engine.policy.config.lora.targets)
    model = plain_model(root / "model", published)
    scores = engine.score(batch_for(0), of="policy")
    for sequence in batch_for(0):
        np.testing.assert_allclose(scores[sequence.sequence_id], plain_scores(model, sequence), atol=1e-5, rtol=0)
    save(engine, tmp_path / "saved", 1)
    write_manifest(tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for name, tensor in published.items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=0)


def test_only_the_decoders_linear_layers_are_quantised_and_they_take_less_memory(root: Path):
    engines = [make_engine(root, bits) for bits in (None, 4)]
    plain, four = map(weights_of, engines)
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, four[name])}
    assert changed == {n for n in plain if ".layers." in n and n.endswith("proj.weight")}
    layers = [m for m in engines[1].policy.model.modules() if isinstance(m, QuantizedLinear)]
    # Half a byte for each weight, and four bytes for 64 of them.
    assert sum(b.nbytes for m in layers for b in m.buffers()) == sum(
        m.in_features * m.out_features * (0.5 + 4 / 64) for m in layers
    )
    assert engines[1].policy.flops.per_token == engines[0].policy.flops.per_token


@pytest.mark.parametrize("bits", [4, 8])
def test_in_bfloat16_a_sharded_learner_differs_from_merged_weights_by_rounding_alone(root: Path, bits: int):
    engine = make_engine(root, bits, model={"dtype": "bfloat16"})
    engine.update(with_reference(engine, batch_for(0)), version=0)
    published = {name: tensor.float() for name, tensor in weights_of(engine).items()}
    scores = engine.score(batch_for(0), of="policy")
    engine.close()
    model = plain_model(root / "model", published)
    apart = np.concatenate([scores[s.sequence_id] - plain_scores(model, s) for s in batch_for(0)])
    assert np.abs(apart).mean() < 5e-3  # of logprobs near -3.8, whose bfloat16 activations have 8 bits


def test_what_a_device_or_a_machine_lacks_is_refused_by_name(root: Path, monkeypatch: pytest.MonkeyPatch):
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
        make_engine(root, 4)


def test_contradictions_of_a_quantised_base_are_refused(tmp_path: Path):
    for sections, message in (
        ({"lora": {"base_bits": 4}}, r"expected lora.rank to be set for frozen weights of 4 bits"),
        ({"lora": {"rank": 4, "base_bits": 3}}, r"lora.base_bits"),
        ({"lora": LORA | {"base_bits": 8, "publish": "adapters"}, "generator": {"backend": "vllm"}}, "weights.parity"),
        ({"lora": LORA | {"base_bits": 8}, "learner": {"offload": "all"}}, r"learner\.offload: expected \"none\" or"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny_config(tmp_path, "model", **sections)
