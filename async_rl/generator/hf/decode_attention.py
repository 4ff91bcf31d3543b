"""Attention for decoding one token a row, without copying keys and values once for every query head.

Transformers' own sdpa path repeats them (`repeat_kv`) when query heads share a KV head; reading the cache is most of a
decode step, so that copy would dominate it. Here the query heads of one KV head become the query positions of one
sdpa call. Shape letters: R = rows, H = KV heads, G = query heads a KV head, N = cached tokens, D = head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "async_rl_sdpa"


def register() -> str:
    """Make the function known to transformers; the name to pass as ``attn_implementation``."""
    AttentionInterface.register(NAME, decode_attention)
    return NAME


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: query [R, H * G, 1, D], key and value [R, H, N, D], mask [R, 1, 1, N].

    Returns:
        [R, 1, H * G, D]. Longer queries (a prefill) go to transformers' own sdpa.
    """
    num_groups = query.shape[1] // key.shape[1]
    if query.shape[2] != 1 or num_groups == 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    grouped_RHGD = query.view(query.shape[0], key.shape[1], num_groups, query.shape[3])
    output_RHGD = torch.nn.functional.scaled_dot_product_attention(
        grouped_RHGD, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output_RHGD.reshape(query.shape[0], 1, query.shape[1], value.shape[3]), None
