"""What fits a model and what is refused by name, without a real model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, LlamaConfig, RwkvConfig

from async_rl.errors import ModelError, WeightsError
from async_rl.generator.hf.causal_model import WeightTable, describe_model, refuse_unsupported


class Tied(nn.Module):
    """An embedding whose weight is the head's, too, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(3, bias=False, dtype=torch.bfloat16)


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.ones(4, 3), "norm.weight": torch.full((3,), 0.5), **more}


def table() -> tuple[Any, WeightTable]:
    model: Any = Tied().requires_grad_(False)
    return model, WeightTable(model)


def test_a_tied_weight_comes_once_and_other_dtypes_are_cast_to_the_engines():
    model, known = table()
    known.check(weights())
    known.replace(sent := weights())
    assert torch.equal(model.head.weight, torch.ones(4, 3))
    assert model.embed.weight.data_ptr() == sent["embed.weight"].data_ptr(), "taken over, not copied"
    assert model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.norm.weight, torch.full((3,), 0.5, dtype=torch.bfloat16))


def test_persistent_buffers_come_in_their_own_dtype_and_others_do_not_come():
    model, _ = table()
    model.register_buffer("bias", torch.zeros(3, dtype=torch.bfloat16))
    model.register_buffer("angles", torch.zeros(3), persistent=False)
    known = WeightTable(model)
    with pytest.raises(WeightsError, match=r"missing \['bias'\], unknown \[\]"):
        known.check(weights())
    with pytest.raises(WeightsError, match=r"bias: expected shape \[3\], got \[4\]"):
        known.check(weights(bias=torch.ones(4)))
    sent = weights(bias=torch.full((3,), 1 + 2.0**-12))
    known.check(sent)
    known.replace(sent, copy=True)
    assert model.bias.dtype == torch.float32
    assert torch.equal(model.bias, sent["bias"])
    assert model.bias.data_ptr() != sent["bias"].data_ptr()
    assert known.digests().keys() == sent.keys()
    with pytest.raises(WeightsError, match=r"unknown \['angles'\]"):
        known.check(weights(bias=torch.zeros(3), angles=torch.zeros(3)))


def quantised(method: str) -> LlamaConfig:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=8)
    config.quantization_config = {"quant_method": method}
    return config


def test_vllm_is_not_started_for_a_quantised_model(tmp_path: Path):
    quantised("fp8").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has a quantization_config"):
        describe_model(tmp_path)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"head.weight": torch.zeros(4, 3)}, r"head\.weight is tied to embed\.weight"),
        ({"head.lora_A.weight": torch.ones(1, 3)}, r"LoRA adapters, head\.lora_A\.weight"),
        ({"extra": torch.ones(1)}, r"unknown \['extra'\]"),
        ({"norm.weight": torch.ones(4)}, r"norm\.weight: expected shape \[3\], got \[4\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(more: dict[str, torch.Tensor], told: str):
    _, known = table()
    known.check(weights(**{"head.weight": torch.ones(4, 3)}))  # an alias may come too if it is equal
    with pytest.raises(WeightsError, match=told):
        known.check(weights(**more))
    with pytest.raises(WeightsError, match=r"missing \['norm\.weight'\]"):
        known.check({"embed.weight": torch.ones(4, 3)})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (quantised("gptq"), "quantised by gptq"),
        (BartConfig(), "runs decoders, got 'bart', which has an encoder too"),
        (RwkvConfig(), r"'rwkv' with rescale_every = 6 divides its weights.* set rescale_every = 0"),
    ],
    ids=["quantised", "encoder", "rescaled"],
)
def test_models_that_the_engine_would_get_wrong_are_refused(config: Any, told: str):
    refuse_unsupported(LlamaConfig())
    with pytest.raises(ModelError, match=told):
        refuse_unsupported(config)
