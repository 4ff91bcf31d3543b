"""Every causal LM of transformers that can be built tiny and offline, by the settings that make it tiny.

``build`` makes one with random weights. Windows, chunks and caps are narrow enough for short sequences to meet them,
and all weights are random, so that an ignored window, cap, sink, bias or scale changes log-probabilities by far more
than rounding does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers

Settings = dict[str, Any]
_NOISE = 0.15
"""Standard deviation of what is added to every weight of a new model, which has many zeros and ones."""

SHAPE: Settings = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: Settings = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
SPARSE: Settings = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
HALF_WINDOW: Settings = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
CONVOLUTION: Settings = {"layer_types": ["conv", "full_attention"]}
LINEAR: Settings = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8,
}  # fmt: skip
STATE: Settings = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4,
}  # fmt: skip
LONGROPE: Settings = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
                        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}  # fmt: skip
"""For Phi 3: other positions in sequences of more than 32 tokens."""
SHARED_EXPERT: Settings = {**EXPERTS, "shared_expert_intermediate_size": 16}
HALF: Settings = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LOCAL: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPED: Settings = {**LATENT, "num_key_value_heads": 2}
_DECODER: Settings = {
    "d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "is_decoder": True, "is_encoder_decoder": False,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_BERT: Settings = {"is_decoder": True, "type_vocab_size": 2}


class Family(NamedTuple):
    """A row of the catalogue: the prefix of the classes in transformers, and settings in addition to ``SHAPE``."""

    prefix: str
    settings: Settings
    model: str = ""
    """The model's class, if it is not ``prefix`` without "Text", and "ForCausalLM"."""
    attention: str = "eager"
    """Transformers' attention that defines the right values."""


FAMILIES: dict[str, Family] = {
    # Full attention
    "Llama": Family("Llama", {}),
    "Qwen 2": Family("Qwen2", {}),
    "Qwen 3": Family("Qwen3", {"head_dim": 16}),
    "Arcee": Family("Arcee", {}),
    "Apertus": Family("Apertus", {}),
    "BitNet": Family("BitNet", {}),
    "Cohere": Family("Cohere", {"logit_scale": 0.25}),
    "DiffLlama": Family("DiffLlama", {}),
    "Ernie 4.5": Family("Ernie4_5", {"head_dim": 8}),
    "Falcon": Family("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    # Transformers' eager attention adds the biases of the positions twice.
    "Falcon, alibi": Family("Falcon", {"alibi": True, "new_decoder_architecture": False}, attention="sdpa"),
    "Gemma": Family("Gemma", {"head_dim": 8}),
    "GLM": Family("Glm", {"head_dim": 8}),
    "GLM 4": Family("Glm4", {"head_dim": 8}),
    "Granite": Family("Granite", {"logits_scaling": 4.0}),
    "Helium": Family("Helium", {"head_dim": 8}),
    "HunYuan dense": Family("HunYuanDenseV1", {"head_dim": 8}),
    "HyperCLOVA X": Family("HyperCLOVAX", {"head_dim": 8}),
    "Jais 2": Family("Jais2", {"head_dim": 8}),
    "MiniCPM 3": Family("MiniCPM3", {**LATENT, "dim_model_base": 32, "scale_emb": 1.0}),
    "Ministral 3": Family("Ministral3", {"head_dim": 8}),
    "nanochat": Family("NanoChat", {"final_logit_softcapping": 2.0}),
    "Nemotron": Family("Nemotron", {}),
    "OLMo": Family("Olmo", {}),
    "OLMo 2": Family("Olmo2", {}),
    "Persimmon": Family("Persimmon", {}),
    "Phi": Family("Phi", {}),
    "Phi 3": Family("Phi3", {}),
    "Seed-OSS": Family("SeedOss", {"head_dim": 8}),
    "SmolLM 3": Family("SmolLM3", {}),
    "StableLM": Family("StableLm", {}),
    "StarCoder 2": Family("Starcoder2", {"sliding_window": None}),
    "Youtu": Family("Youtu", {**LATENT}),
    "HRM": Family("HrmText", {}, "HrmTextForCausalLM"),
    # Learned, fixed or biased positions
    "GPT-2": Family("GPT2", {}, "GPT2LMHeadModel"),
    "OpenAI GPT": Family("OpenAIGPT", {}, "OpenAIGPTLMHeadModel"),
    "GPT-BigCode": Family("GPTBigCode", {}),
    "GPT-J": Family("GPTJ", {"rotary_dim": 4}),
    "GPT-Neo": Family("GPTNeo", {"attention_types": [[["local", "global"], 1]], "window_size": 8}),
    "GPT-NeoX": Family("GPTNeoX", {}),
    "GPT-NeoX Japanese": Family("GPTNeoXJapanese", {"intermediate_multiple_size": 2}),
    "CodeGen": Family("CodeGen", {"rotary_dim": 4}),
    "OPT": Family("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "OPT, projected": Family("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "BLOOM": Family("Bloom", {}),
    "MPT": Family("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    "XGLM": Family("XGLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    "BioGPT": Family("BioGpt", {}),
    "CTRL": Family("CTRL", {"dff": 48, "n_positions": 256}, "CTRLLMHeadModel"),
    # Windows, chunks, sinks, caps
    "Mistral": Family("Mistral", {"sliding_window": 8}),
    "Ministral": Family("Ministral", {"head_dim": 8, **HALF}),
    "Qwen 2, windows": Family("Qwen2", HALF_WINDOW),
    "StarCoder 2, windows": Family("Starcoder2", {"sliding_window": 8}),
    "Phi 3, windows": Family("Phi3", {"sliding_window": 8}),
    "Gemma 2": Family(
        "Gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0,
         **HALF},
    ),
    "Gemma 3": Family("Gemma3Text", {"head_dim": 8, "query_pre_attn_scalar": 8, **HALF}),
    "Gemma 3, soft caps": Family(
        "Gemma3Text", {"head_dim": 8, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, **HALF}
    ),
    "Gemma 3n": Family(
        "Gemma3nText",
        {"head_dim": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
         "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "altup_num_inputs": 2,
         "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    "Gemma 4": Family(
        "Gemma4Text",
        {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
         "num_kv_shared_layers": 0, "final_logit_softcapping": 2.0, **HALF},
    ),
    "VaultGemma": Family(
        "VaultGemma", {"head_dim": 8, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, **HALF}
    ),
    "Cohere 2": Family("Cohere2", {"logit_scale": 0.25, **HALF}),
    "EXAONE 4": Family("Exaone4", HALF),
    "OLMo 3": Family("Olmo3", HALF),
    "CWM": Family("Cwm", {"head_dim": 8, **HALF}),
    "ModernBERT decoder": Family("ModernBertDecoder", {**HALF, "local_attention": 16}),
    "Granite SWA": Family("GraniteSWA", HALF),
    "Llama 4": Family(
        "Llama4Text",
        {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 8,
         "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
        "Llama4ForCausalLM",
    ),
    "GPT-OSS": Family("GptOss", {"num_local_experts": 4, "head_dim": 8, **HALF}),
    "MiMo-V2-Flash": Family("MiMoV2Flash", {**EXPERTS, "n_routed_experts": 4, **HALF}),
    # Experts
    "Mixtral": Family("Mixtral", {"num_local_experts": 4}),
    "Qwen 2 MoE": Family("Qwen2Moe", SHARED_EXPERT),
    "Qwen 2 MoE, windows": Family("Qwen2Moe", {**HALF_WINDOW, **SHARED_EXPERT}),
    "Qwen 3 MoE": Family("Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    "AFMoE": Family("Afmoe", {**EXPERTS, "head_dim": 8, "num_dense_layers": 1, **HALF}),
    "Aria": Family(
        "AriaText", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}, "AriaTextForCausalLM"
    ),
    "DBRX": Family(
        "Dbrx",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
         "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
         "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "DeepSeek-V2": Family("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
    "DeepSeek-V3": Family("DeepseekV3", LATENT),
    "DeepSeek-V3.2": Family("DeepseekV32", SPARSE),
    "dots.1": Family("Dots1", {**_GROUPED, "head_dim": 8}),
    "Ernie 4.5 MoE": Family("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "EXAONE MoE": Family("ExaoneMoe", {**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **HALF}),
    "FlexOLMo": Family("FlexOlmo", EXPERTS),
    "GLM 4 MoE": Family("Glm4Moe", {**_GROUPED, "head_dim": 8}),
    "GLM 4 MoE lite": Family("Glm4MoeLite", LATENT),
    "GLM DSA": Family("GlmMoeDsa", SPARSE),
    "Granite MoE": Family("GraniteMoe", {**_LOCAL, "logits_scaling": 4.0}),
    "Granite MoE, shared expert": Family("GraniteMoeShared", {**_LOCAL, "shared_intermediate_size": 16}),
    "HunYuan MoE": Family("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "Hy 3": Family("HYV3", {**EXPERTS, "head_dim": 8}),
    "JetMoE": Family("JetMoe", {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4}),
    "LongCat-Flash": Family(
        "LongcatFlash",
        {**LATENT, "num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
         "zero_expert_num": 1, "moe_topk": 2, "head_dim": 8},
    ),
    "MiniMax-M2": Family("MiniMaxM2", {**_LOCAL, "head_dim": 8}),
    "OLMoE": Family("Olmoe", EXPERTS),
    "Phi-MoE": Family("Phimoe", {"num_local_experts": 4}),
    "Phi-MoE, windows": Family("Phimoe", {"num_local_experts": 4, "sliding_window": 8}),
    "Solar Open": Family("SolarOpen", {**_GROUPED, "head_dim": 8}),
    # State along the row: linear attention, convolutions, state space
    "Qwen 3 Next": Family("Qwen3Next", {**LINEAR, **SHARED_EXPERT}),
    "Qwen 3.5": Family("Qwen3_5Text", LINEAR),
    "Qwen 3.5 MoE": Family("Qwen3_5MoeText", {**LINEAR, **SHARED_EXPERT}),
    "Kimi Linear": Family(
        "KimiLinear",
        {**LATENT, "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 8,
         "head_dim": 8, "num_experts": 4, "num_experts_per_token": 2},
    ),
    "OLMo hybrid": Family("OlmoHybrid", LINEAR),
    "MiniMax": Family(
        "MiniMax", {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 4}
    ),
    "LFM 2": Family("Lfm2", CONVOLUTION),
    "LFM 2 MoE": Family("Lfm2Moe", {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1}),
    "Mamba": Family("Mamba", {"state_size": 8}),
    "Mamba 2": Family(
        "Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 4}
    ),
    "Falcon Mamba": Family("FalconMamba", {"state_size": 8}),
    "Falcon-H1": Family("FalconH1", {**STATE, "mamba_d_ssm": 64, "lm_head_multiplier": 0.25}),
    "Granite 4 hybrid": Family(
        "GraniteMoeHybrid",
        {**STATE, **_LOCAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
         "logits_scaling": 4.0},
    ),
    "Bamba": Family("Bamba", {**STATE, "attn_layer_indices": [1]}),
    "Jamba": Family(
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False},
    ),
    "Nemotron-H": Family(
        "NemotronH",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
         "n_groups": 1, "chunk_size": 4, "head_dim": 8},
    ),
    "Zamba": Family(
        "Zamba",
        {"layer_types": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 2,
         "mamba_dt_rank": 4, "use_mamba_kernels": False, "attention_hidden_size": 64, "attention_head_dim": 16,
         "tie_word_embeddings": False},
    ),
    "Zamba 2": Family(
        "Zamba2",
        {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 4,
         "mamba_ngroups": 1, "chunk_size": 4, "num_mem_blocks": 1, "use_shared_attention_adapter": False},
    ),
    "RecurrentGemma": Family(
        "RecurrentGemma", {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}
    ),
    "RWKV": Family("Rwkv", {"attention_hidden_size": 32, "context_length": 256, "rescale_every": 0}),
    "RWKV, rescaled": Family("Rwkv", {"attention_hidden_size": 32, "context_length": 256, "rescale_every": 1}),
    "xLSTM": Family(
        "xLSTM",
        {"num_blocks": 2, "num_heads": 4, "chunkwise_kernel": "chunkwise--native_autograd",
         "sequence_kernel": "native_sequence__native", "step_kernel": "native", "chunk_size": 4},
    ),
    "DeepSeek-V4": Family(
        "DeepseekV4",
        {"sliding_window": 8, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "head_dim": 16, "index_n_heads": 2,
         "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "num_key_value_heads": 1, "num_hash_layers": 0},
    ),
    "Doge": Family("Doge", {}),
    # Encoders with a causal head, as decoders
    "BERT as decoder": Family("Bert", _BERT, "BertLMHeadModel"),
    "RoBERTa as decoder": Family("Roberta", {**_BERT, "max_position_embeddings": 260}),
    "BART's decoder": Family("Bart", _DECODER),
    "BERT without a causal mask": Family("Bert", {**_BERT, "is_decoder": False}, "BertLMHeadModel"),
}  # fmt: skip


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return the family's model with random weights, float32. ``changes``: other settings than the catalogue's."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config: Any = getattr(transformers, f"{family.prefix}Config")
    model: Any = getattr(transformers, family.model or f"{family.prefix.removesuffix('Text')}ForCausalLM")
    built = model(config(**{**SHAPE, **family.settings, **changes})).float().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * _NOISE)
    return built
