"""Tiny random mixture-of-experts models on disk, with a tokenizer of one token a character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.learner.tiny import tiny_model

_SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.3, "num_experts_per_tok": 2,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_NARROW: dict[str, Any] = {"moe_intermediate_size": 16}
_SIGMOID: dict[str, Any] = {
    **_NARROW, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
_LOCAL: dict[str, Any] = {"num_local_experts": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {**_NARROW, "num_experts": 8, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", {**_NARROW, "num_experts": 8, "norm_topk_prob": True, "head_dim": 8}),
    "mixtral": ("Mixtral", _LOCAL),
    "olmoe": ("Olmoe", {"num_experts": 8}),
    "gpt_oss": ("GptOss", {**_LOCAL, "head_dim": 8, "layer_types": ["full_attention"] * 3}),
    "granitemoe": ("GraniteMoe", _LOCAL),
    "deepseek_v3": ("DeepseekV3", {**_SIGMOID, **_LATENT}),
    "glm4_moe": ("Glm4Moe", {**_SIGMOID, "head_dim": 8}),
}
"""Model type -> its name in the classes of transformers, its settings."""


def moe_model(directory: Path, model_type: str = "qwen3_moe", *, seed: int = 0, **settings: Any) -> Path:
    """Write a model of ``model_type`` with 8 experts, 2 of them for each token, in layers 0 to 2 or 1 to 2.

    Where its routers have a bias, the bias is random.
    """
    tiny_model(directory)
    vocabulary = transformers.AutoConfig.from_pretrained(directory).vocab_size
    name, own = FAMILIES[model_type]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": vocabulary, **_SHAPE, **own, **settings})
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name.endswith("e_score_correction_bias"):
            # 1 + 2**-12 and the like have no bfloat16 of the same value.
            tensor.copy_(1 + torch.arange(len(tensor)) * 2.0**-12)
    model.save_pretrained(directory)
    return directory


def loaded(directory: Path) -> Any:
    """The model in ``directory``, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
