"""Estimates from a model's shape what it computes for a sequence. ``fsdp_engine`` balances ranks by it.

Only forward products are counted: 2 floating-point operations for each parameter and token, and 4 for each attention
channel, layer and pair of tokens (query times key, and weight times value). The backward pass about doubles both alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

from async_rl.learner.balance import Work

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def work_of(causal_lm: PreTrainedModel) -> Work:
    """Return the work of the model's attention and head, in units of a row token's products in its layers.

    Layers whose attention has a window, or is linear, count as work that grows with the tokens alone. Of experts, those
    that a token uses count. Norms and activations don't count.
    """
    config: Any = causal_lm.config.get_text_config()
    embedding: Any = cast(nn.Embedding, causal_lm.get_input_embeddings()).weight
    head: Any = cast(nn.Linear, causal_lm.get_output_embeddings()).weight
    num_experts = next((n for key in _NUM_EXPERTS if (n := getattr(config, key, None))), 0)
    share = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts if num_experts else 1.0
    num_parameters = sum(
        parameter.numel() * (share if ".experts." in name else 1.0)
        for name, parameter in causal_lm.base_model.named_parameters()
        if parameter is not embedding and parameter is not head
    )
    kinds = getattr(config, "layer_types", None)
    num_layers = sum(kind == "full_attention" for kind in kinds) if kinds else config.num_hidden_layers
    num_heads = getattr(config, "num_attention_heads", None) or 0
    # Not config.head_dim, which raises where it varies between layers (Gemma 4).
    head_dim = config.to_dict().get("head_dim") or (config.hidden_size // num_heads if num_heads else 0)
    num_parameters = max(num_parameters, 1.0)
    return Work(
        prediction=head.numel() / num_parameters,
        pair=2 * num_layers * num_heads * head_dim / num_parameters,
    )
