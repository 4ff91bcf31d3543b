"""Sequence parallelism: ranks compute a micro-batch together, each a part of its tokens. Called by ``passes.py``.

Every rank of a group has the whole micro-batch and computes one of n equal parts of its row: embeddings, norms and
matrix products of its own tokens, and the head for those that predict something. Attention exchanges keys, values and
queries (``split_attention.py``). Then every rank gets the log-probabilities of all tokens and computes the whole loss,
because a loss may need whole sequences. Its backward pass takes the derivatives by its own tokens, so the gradients of
the ranks add up to that of the micro-batch. Shape letters: T = tokens of the row, P = tokens of a part, N = predicted
tokens, M = those that this rank's part predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from async_rl.errors import ModelError
from async_rl.learner.data.packing import MicroBatch, Packing
from async_rl.learner.losses.batch import IndexedSlopeFunction, SlopeFunction, Slopes, TokenLogprobs
from async_rl.learner.model.mask_tensors import MaskTensors
from async_rl.learner.model.policy_model import DeviceBatch
from async_rl.learner.model.split_attention import PartLayout
from async_rl.learner.sequences import COLUMNS

_OF_TOKENS = (*COLUMNS, "targets", "temperatures", "after_update", "sequence_index")
"""Fields of ``DeviceBatch`` that have a value for each of the N tokens, or are [0] without values."""


def check_packing(packing: Packing, num_parts: int) -> None:
    """Check that a row of a model that uses ``packing`` can be computed in ``num_parts`` parts.

    Raises:
        ModelError: it can't.
    """
    if num_parts > 1 and packing == "padded":
        raise ModelError(
            f"parallel.sequence: expected 1 for a model that computes padded rows (learner.packing), got {num_parts}; "
            f"only packed rows can be divided, so leave the key out, or choose a model such as Qwen2, Qwen3 or Llama"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The part of a micro-batch that this rank computes.

    Attributes:
        batch: its tokens, for the model. Its row has P tokens, the last of which may be padding, and M predictions.
        tokens: int64 [M], their places in N.
        num_tokens: N.
        num_others: K, the number of other tokens at each place whose log-probabilities are computed.
        group: the ranks of the parts.
    """

    batch: DeviceBatch
    tokens: Tensor
    num_tokens: int
    num_others: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, micro_batch: MicroBatch, whole: DeviceBatch, group: dist.ProcessGroup) -> Part:
        """Return this rank's part of ``micro_batch``, which is ``whole`` on the device."""
        place, num_parts = dist.get_rank(group), dist.get_world_size(group)
        num_row, device = len(micro_batch.token_ids), whole.token_ids.device
        size = -(-num_row // num_parts)
        row = slice(place * size, min((place + 1) * size, num_row))
        is_own = micro_batch.predict_index // size == place
        tokens = _moved(np.flatnonzero(is_own), device)
        layout = PartLayout(
            whole=whole.layout, num_tokens=size, place=place, num_parts=num_parts, group=group,
            cu_seqlens=micro_batch.cu_seqlens, token_index=micro_batch.token_index, device=device,
        )  # fmt: skip
        of_tokens = {name: getattr(whole, name) for name in _OF_TOKENS}
        num_tokens = len(micro_batch.targets)
        batch = replace(
            whole,
            token_ids=_padded(whole.token_ids[row], size),
            position_ids=_padded(whole.position_ids[row], size),
            part=layout,
            predict_index=whole.predict_index.index_select(0, tokens) - place * size,
            sampling_mask=None if whole.sampling_mask is None else _chosen(whole.sampling_mask, is_own),
            routes=None if whole.routes is None else _padded(whole.routes.view(num_row, -1)[row], size).flatten(),
            **{name: values.index_select(0, tokens) for name, values in of_tokens.items() if len(values)},
        )
        num_others = whole.teacher_top_ids.shape[1] if len(whole.teacher_top_ids) else 0
        return cls(batch, tokens, num_tokens, num_others, group)

    def predicts(self, predict: IndexedSlopeFunction | None) -> SlopeFunction | None:
        """Return ``predict``, which takes places in N, for places in M."""
        if predict is None:
            return None

        def of_part(place: slice, scored: TokenLogprobs) -> Slopes:
            return predict(self.tokens[place], scored)

        return of_part

    def gather(self, scored: TokenLogprobs) -> TokenLogprobs:
        """Return the values of all N tokens from those of each rank's own M.

        All ranks of the group call this together. They must compute the same loss: the backward pass takes this rank's
        derivatives of it, and does not add up those of other ranks.
        """
        if not self.num_tokens:  # a dummy
            return scored
        # A rank without predictions has none of other tokens, too, but must take part in their sum.
        nothing_MK = scored.logprobs.new_zeros(len(scored.logprobs), self.num_others)
        others_MK = nothing_MK if scored.others is None else scored.others
        logprobs_N, entropies_N, others_NK = _Gather.apply(
            scored.logprobs, scored.entropies, others_MK, self.tokens, self.num_tokens, self.group
        )
        return TokenLogprobs(logprobs_N, entropies_N, others_NK if self.num_others else None)


def _moved(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _padded(values: Tensor, size: int) -> Tensor:
    """Lengthen the first dimension to ``size`` by zeros."""
    return pad(values, (*[0, 0] * (values.ndim - 1), 0, size - len(values)))


def _chosen(mask: MaskTensors, is_chosen: np.ndarray) -> MaskTensors:
    words = np.flatnonzero(np.repeat(is_chosen, np.abs(mask.sizes)))
    return MaskTensors(mask.sizes[is_chosen], mask.words.index_select(0, _moved(words, mask.words.device)))


class _Gather(torch.autograd.Function):
    """Put the values of each rank's tokens at their places among all N."""

    @staticmethod
    def forward(
        ctx: Any, logprobs_M: Tensor, entropies_M: Tensor, others_MK: Tensor, tokens_M: Tensor, num_tokens: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        values = logprobs_M.new_zeros(2 + others_MK.shape[1], num_tokens)
        values[:, tokens_M] = torch.stack([logprobs_M, entropies_M, *others_MK.unbind(1)])
        dist.all_reduce(values, group=group)
        ctx.save_for_backward(tokens_M)
        logprobs_N, entropies_N = (row.clone() for row in values[:2])
        others_NK = values[2:].T.contiguous()
        found = (logprobs_N, entropies_N, others_NK)
        ctx.mark_non_differentiable(*(t for t, needed in zip(found, ctx.needs_input_grad, strict=False) if not needed))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        (tokens_M,) = ctx.saved_tensors
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(g.index_select(0, tokens_M) if is_needed else None for g, is_needed in needed), None, None, None
