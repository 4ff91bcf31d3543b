"""Tiny random models of many families, by the settings that make each of them tiny."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
SPARSE: dict[str, Any] = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
WINDOW: dict[str, Any] = {"sliding_window": 8}
HALF_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
                            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}  # fmt: skip
CONVOLUTION: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8,
}  # fmt: skip
STATE: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4,
}  # fmt: skip
SHARED_EXPERT: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 16}
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 next": ("Qwen3Next", {**LINEAR, **SHARED_EXPERT}),
    "qwen3.5": ("Qwen3_5Text", LINEAR),
    "qwen3.5 moe": ("Qwen3_5MoeText", {**LINEAR, **SHARED_EXPERT}),
    "olmo hybrid": ("OlmoHybrid", LINEAR),
    "mamba": ("Mamba", {"state_size": 8}),
    "falcon mamba": ("FalconMamba", {"state_size": 8}),
    "mamba 2": ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 4}),
    "granite 4 hybrid": (
        "GraniteMoeHybrid", {**STATE, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
                             "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    ),
    "bamba": ("Bamba", {**STATE, "attn_layer_indices": [1]}),
    "falcon h1": ("FalconH1", {**STATE, "mamba_d_ssm": 64}),
    "nemotron h": (
        "NemotronH", {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                      "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4, "head_dim": 8},
    ),
    "zamba 2": (
        "Zamba2", {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4,
                   "mamba_ngroups": 1, "chunk_size": 4, "num_mem_blocks": 1, "use_shared_attention_adapter": False},
    ),
    "jamba": (
        "Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
                  "num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False},
    ),
    "recurrent gemma": (
        "RecurrentGemma", {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    ),
}  # fmt: skip
"""Families with state along the row: family in transformers, settings."""


def causal_lm(family: str, settings: dict[str, Any]) -> Any:
    """A causal LM of ``family`` with random weights, float32."""
    torch.manual_seed(0)
    config: Any = getattr(transformers, f"{family}TextConfig" if family == "Llama4" else f"{family}Config")
    model: Any = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    return model(config(**{**SHAPE, **settings})).float()
