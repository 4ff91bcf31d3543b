"""Attention of a packed row whose tokens are split over ranks. ``sequence_parallel`` gives each rank its part.

Each of the n ranks has P tokens of the row, with all heads. Attention needs other tokens, so ranks exchange: a rank
gives its part of some heads away, and gets other parts of its own heads (all-to-all, DeepSpeed-Ulysses,
arXiv:2309.14509). Then it computes the attention of the whole row with its heads, and the results go back. Key and
value heads are repeated if they are too few to divide.

That works if n divides the heads. Otherwise u = gcd(n, H) neighbours divide the heads of u parts, a *block*, and each
block gets the keys and values of the whole row. A rank then computes the queries of its block. Blocks at the end of
sequences have more to do: their queries attend to more tokens.

Shape letters: n = ranks, u = ranks of a block, P = tokens of a part, T = tokens of the row, H = heads, K = key and
value heads, D = head dimension, S = sequences, Q = queries of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from async_rl.learner.model.attention import Attention, PackedLayout, Places, report, varlen, why_padded

_QUADRATIC = "; the masks of blocks take memory that is quadratic in the longest sequence"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some consecutive tokens of a row as queries, and the keys that they attend to.

    The block is cut where another sequence begins, and each piece attends to its sequence up to the piece's end.

    Attributes:
        num_tokens: Q.
        num_queries, num_keys: those of each piece.
        key_index: int64 [sum of the numbers of keys], the place of each piece's keys in the row.
        of_queries, of_keys: the places of the pieces.
    """

    num_tokens: int
    num_queries: list[int]
    num_keys: list[int]
    key_index: Tensor
    of_queries: Places
    of_keys: Places

    @classmethod
    def of(cls, cu_seqlens: np.ndarray, token_index: np.ndarray, start: int, stop: int, device: torch.device) -> Block:
        """Return the block of the tokens ``start`` to ``stop`` (less if the row ends before) of a ``MicroBatch``."""
        bounds, index = cu_seqlens.astype(np.int64), token_index.astype(np.int64)
        # A shared token belongs to the first sequence that has it.
        places = np.unique(index, return_index=True)[1][start:stop]
        sequences = np.searchsorted(bounds, places, side="right") - 1
        is_cut = (np.diff(places) != 1) | (np.diff(sequences) != 0)
        firsts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(is_cut) + 1])[: len(places)]
        ends = places[np.append(firsts[1:], len(places)) - 1] + 1 if len(places) else firsts
        begins = bounds[sequences[firsts]]
        keys = [index[begin:end] for begin, end in zip(begins, ends, strict=True)]
        num_queries, num_keys = np.diff(firsts, append=len(places)).tolist(), (ends - begins).tolist()
        return cls(
            num_tokens=len(places),
            num_queries=num_queries,
            num_keys=num_keys,
            key_index=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *keys])).to(device, non_blocking=True),
            of_queries=_places(num_queries, device),
            of_keys=_places(num_keys, device),
        )

    def attend(self, query_QHD: Tensor, key_TKD: Tensor, value_TKD: Tensor, how: Attention) -> Tensor:
        """Return the attention of the block's tokens, [Q, H, D of the values]."""
        if not self.num_tokens:
            # It depends on all of them, or this rank would miss the collectives of the backward pass.
            nothing = (query_QHD.sum() + key_TKD.sum() + value_TKD.sum()) * 0.0
            return query_QHD.new_zeros(0, query_QHD.shape[1], value_TKD.shape[2]) + nothing
        key, value = (t.index_select(0, self.key_index) for t in (key_TKD, value_TKD))
        reason = "of dropout" if how.dropout else why_padded(query_QHD, value_TKD)
        report(query_QHD, reason + (_QUADRATIC if reason else ""))
        if reason:
            return self._masked(query_QHD, key, value, how)
        return varlen(query_QHD, key, value, self.of_queries, self.of_keys, how)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
        outputs: list[Tensor] = []
        parts = (query.split(self.num_queries), key.split(self.num_keys), value.split(self.num_keys))
        for query_QHD, key_LKD, value_LKD in zip(*parts, strict=True):
            out = scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (query_QHD, key_LKD, value_LKD)),
                attn_mask=_mask(len(query_QHD), len(key_LKD), how.window, query.device),
                dropout_p=how.dropout,
                scale=how.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


def _places(lengths: Sequence[int], device: torch.device) -> Places:
    bounds = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device, non_blocking=True)
    return Places(bounds, max(lengths, default=0))


def _mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [queries, keys]: which keys each query attends to. The queries are the last of the keys' tokens."""
    place = torch.arange(num_keys, device=device)
    distance = place[num_keys - num_queries :, None] - place
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True, eq=False)
class PartLayout:
    """One of n equal parts of a row, which ranks compute together. Its methods are those of ``attention.PackedLayout``.

    The last parts may be longer than the row: the rest is padding.

    Attributes:
        whole: the layout of the row.
        num_tokens: P.
        place: which part this is.
        num_parts: n.
        group: the ranks of the parts, in their order.
        cu_seqlens, token_index: as in ``MicroBatch``.
        device: where the layout's tensors are stored.
    """

    whole: PackedLayout
    num_tokens: int
    place: int
    num_parts: int
    group: dist.ProcessGroup
    cu_seqlens: np.ndarray
    token_index: np.ndarray
    device: torch.device
    _blocks: dict[int, Block] = field(default_factory=dict[int, Block])

    @property
    def max_length(self) -> int:
        """Tokens of the row's longest sequence."""
        return self.whole.max_length

    @property
    def real(self) -> slice:
        """The tokens of the part that are no padding."""
        return slice(max(0, self.whole.num_tokens - self.place * self.num_tokens))

    def attend(self, query_PHD: Tensor, key_PKD: Tensor, value_PKD: Tensor, how: Attention) -> Tensor:
        """Return each token's attention to its sequence, up to itself, [P, H, D of the values].

        All ranks of the group call this together, also in the backward pass.
        """
        u = math.gcd(self.num_parts, query_PHD.shape[1])
        first = self.place // u * u
        block = range(first, first + u)
        times = math.lcm(key_PKD.shape[1], u) // key_PKD.shape[1]
        both_PKD = torch.cat([key_PKD, value_PKD], dim=-1)
        both_PKD = both_PKD if times == 1 else both_PKD.repeat_interleave(times, dim=1)
        parts_uPHD = self._exchange(_by_rank(query_PHD, u), block)
        parts_nPKD = self._exchange(_by_rank(both_PKD, u).repeat(self.num_parts // u, 1, 1, 1), range(self.num_parts))
        both_TKD = parts_nPKD.flatten(0, 1)[: self.whole.num_tokens]
        key_TKD, value_TKD = both_TKD.split([key_PKD.shape[-1], value_PKD.shape[-1]], dim=-1)
        key_TKD, value_TKD = key_TKD.to(key_PKD.dtype), value_TKD.to(value_PKD.dtype)
        query_QHD = parts_uPHD.flatten(0, 1)
        num_padded = len(query_QHD)
        if u == self.num_parts:
            out_QHD = self.whole.attend(query_QHD[: self.whole.num_tokens], key_TKD, value_TKD, how)
        else:
            queries = self._block(u)
            out_QHD = queries.attend(query_QHD[: queries.num_tokens], key_TKD, value_TKD, how)
        out_QHD = pad(out_QHD, (0, 0, 0, 0, 0, num_padded - len(out_QHD)))
        parts_uPHD = self._exchange(out_QHD.unflatten(0, (u, self.num_tokens)), block)
        return parts_uPHD.transpose(0, 1).flatten(1, 2)

    def _exchange(self, tensor: Tensor, ranks: range) -> Tensor:
        """Send ``tensor[i]`` to the i-th of ``ranks``. Return what these sent to this rank, in their order."""
        counts = [int(rank in ranks) for rank in range(self.num_parts)]
        return _Exchange.apply(tensor, counts, self.group)

    def _block(self, u: int) -> Block:
        """Return the block of this rank, if u ranks divide the heads. Layers may have different numbers of heads."""
        if u not in self._blocks:
            start = self.place // u * u * self.num_tokens
            self._blocks[u] = Block.of(
                self.cu_seqlens, self.token_index, start, start + u * self.num_tokens, self.device
            )
        return self._blocks[u]


def _by_rank(heads_PHD: Tensor, u: int) -> Tensor:
    """Divide the heads over u ranks, [u, P, H / u, D]."""
    return heads_PHD.unflatten(1, (u, -1)).transpose(0, 1)


class _Exchange(torch.autograd.Function):
    """All-to-all of a tensor whose first dimension has ``counts[r]`` rows for rank r, and as many from it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _all_to_all(tensor, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        return _all_to_all(gradient, ctx.counts, ctx.group), None, None


def _all_to_all(tensor: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    dist.all_to_all_single(received, tensor.contiguous(), counts, counts, group=group)
    return received
