"""One interface to a causal LM's forward pass, and the implementation that any Hugging Face model has: calling it.

``make_forward`` picks the shortest one for a model. Called by the transformers backend under inference mode. Shape
letters: R = rows, V = vocabulary, B = prompts, T = tokens of the longest prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from async_rl.generator.hf.llama_forward import LlamaForward
from async_rl.generator.hf.slot_cache import PrefillCache, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
