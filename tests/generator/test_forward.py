"""The direct forward pass against transformers' own modules, over one cache each, fed the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from async_rl.generator.hf.forward import (
    Forward,
    LlamaForward,
    TransformersForward,
    make_forward,
    register_decode_attention,
)
from async_rl.generator.hf.slots import SlotCache

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
RELATIVES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama with biases": LlamaConfig(**SIZES, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(**SIZES, num_key_value_heads=1, rope_parameters=LLAMA3_ROPE),
    "dynamic rope": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=DYNAMIC_ROPE),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, head_dim=16, sliding_window=None),
    "qwen2, tied": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "gelu": LlamaConfig(**SIZES, num_key_value_heads=2, hidden_act="gelu_pytorch_tanh"),
}


def built(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights everywhere: norms and biases too, which a new model has as ones and zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=register_decode_attention())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def decoded(forward: Forward, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Logits of five steps of four ragged rows behind prefilled prompts, and the prompts' keys and values."""
    cache = SlotCache(model.config.num_hidden_layers, 6, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 7, 1, 5]
    prefilled = forward.prefill(torch.randint(3, VOCABULARY, (4, 7), generator=generator))
    prefixes = [prefilled.prefix(row, length) for row, length in enumerate(lengths)]
    cache.reserve(8, 24)
    for row, prefix in enumerate(prefixes):
        cache.write_prefix(row, 1, prefix)
    logits, positions = [], torch.tensor(lengths)
    for _ in range(5):
        length = cache.padded(int(positions.max()) + 1)
        cache.reserve(length, 24)
        cache.begin_step(positions, length)
        logits.append(forward.decode(torch.randint(3, VOCABULARY, (4,), generator=generator), positions, cache))
        positions = positions + 1
    return torch.stack(logits), torch.cat([torch.stack([p.keys, p.values]).flatten() for p in prefixes])


@pytest.mark.parametrize("name", RELATIVES)
def test_the_direct_pass_gives_the_logits_and_prefixes_of_the_models_own_modules(name):
    model = built(RELATIVES[name])
    assert isinstance(make_forward(model), LlamaForward)
    for got, expected in zip(decoded(LlamaForward(model), model), decoded(TransformersForward(model), model)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2, tied", "qwen3"])
def test_the_direct_pass_rounds_bfloat16_where_the_models_own_modules_do(name):
    # One rounding of bfloat16 is 2**-8; other places to round would show in most of the logits.
    model = built(RELATIVES[name], torch.bfloat16)
    got, expected = (decoded(kind(model), model)[0][0] for kind in (LlamaForward, TransformersForward))
    assert got.dtype == torch.bfloat16
    assert (got == expected).float().mean() > 0.9


@torch.inference_mode()
def test_a_position_has_the_same_angles_whatever_the_length_of_the_table():
    # The deterministic mode relies on it: how long the table is depends on what ran before.
    model = built(RELATIVES["llama 3 rope"])
    x, positions = torch.zeros(1, 32), torch.arange(64)
    short = LlamaForward(model)._rotation(x, positions, 10)
    grown = LlamaForward(model)._rotation
    grown(x, positions, 30)
    for got, expected in zip(grown(x, positions, 250), short, strict=True):
        assert torch.equal(got, expected)


def test_only_the_known_classes_with_plain_linear_modules_take_the_direct_pass():
    class Adapted(nn.Linear):
        pass

    class Derived(type(built(RELATIVES["llama"]))):  # might compute anything
        pass

    assert not LlamaForward.fits(Derived(RELATIVES["llama"]))
    model: Any = built(RELATIVES["llama"])
    model.model.layers[1].self_attn.q_proj = Adapted(32, 32, bias=False)
    assert isinstance(make_forward(model), TransformersForward)
