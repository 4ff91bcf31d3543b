"""Small models of many families that vLLM's CPU kernels take, by the settings that make each of them small."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "initializer_range": 0.15,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# vLLM has a head of its own for some families, so their models here have no tied one.
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
STATE: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "gemma 3": ("Gemma3Text", {**WINDOWS, "query_pre_attn_scalar": 32}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "gpt-oss": (
        "GptOss", {**WINDOWS, **UNTIED, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
                   "max_position_embeddings": 131072},
    ),
    "qwen3 next": ("Qwen3Next", {**LINEAR, **EXPERTS, **UNTIED, "shared_expert_intermediate_size": 32}),
    "mamba 2": ("Mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "granite 4 hybrid": (
        "GraniteMoeHybrid", {**STATE, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
                             "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
}  # fmt: skip
"""Family in transformers and its settings."""


def make_family(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A causal LM of the family ``name``, but for ``changes`` of its config. Random weights, float32."""
    family, settings = FAMILIES[name]
    torch.manual_seed(seed)
    config: Any = getattr(transformers, f"{family}Config")(**(SHAPE | settings | changes))
    model: Any = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    config._attn_implementation = "eager"
    config.architectures = [model.__name__]  # as in every model that save_pretrained wrote
    return model(config).float().eval()
