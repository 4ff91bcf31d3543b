"""One interface to a causal LM's forward pass, and the implementation that any Hugging Face model has: calling it.

``make_forward`` picks the shortest implementation for a model. Called by the transformers backend under inference mode.

``decode_attention`` is the attention of the called model when it decodes one token a row. Transformers' own sdpa path
repeats keys and values once for every query head (``repeat_kv``) when query heads share a KV head; reading the cache is
most of a decode step, so that copy would take most of its time. Here the query heads of one KV head become the query
positions of one sdpa call.

Shape letters: R = rows, V = vocabulary, B = prompts, T = tokens of the longest prompt, H = KV heads, N = cached tokens,
G = query heads a KV head, D = head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_rl.generator.hf.llama_forward import LlamaForward
from async_rl.generator.hf.slot_cache import PrefillCache, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECODE_ATTENTION = "async_rl_sdpa"


class Forward(Protocol):
    """A model's forward pass, always with the weights that its parameters hold at the time."""

    def decode(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        """Logits [R, V] after one more token a row, int64 [R]; ``cache`` has begun the step with these positions."""
        ...

    def prefill(self, ids_BT: Tensor) -> PrefillCache:
        """The keys and values of prompts, int64 [B, T], padded on the right with any token."""
        ...


def make_forward(model: PreTrainedModel) -> Forward:
    """The shortest way through ``model`` that gives the same logits."""
    return LlamaForward(model) if LlamaForward.fits(model) else TransformersForward(model)


class TransformersForward:
    """Calls the model. Most of a small model's step is then spent on its way from module to module."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def decode(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        output = self._model(
            input_ids=ids_R[:, None],
            attention_mask=~cache.hidden_RN[:, None, None],
            position_ids=positions_R[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def prefill(self, ids_BT: Tensor) -> PrefillCache:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        # Padding is on the right, where a causal mask hides it from everything that is kept.
        mask_TT = positions_T[None, :] <= positions_T[:, None]
        cache = PrefillCache()
        self._model.base_model(
            input_ids=ids_BT,
            attention_mask=mask_TT[None, None].expand(len(ids_BT), -1, -1, -1),
            position_ids=positions_T.expand(len(ids_BT), -1),
            past_key_values=cache,
            use_cache=True,
        )
        return cache


def register_decode_attention() -> str:
    """Make the function known to transformers; the name to pass as ``attn_implementation``."""
    AttentionInterface.register(DECODE_ATTENTION, decode_attention)
    return DECODE_ATTENTION


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
