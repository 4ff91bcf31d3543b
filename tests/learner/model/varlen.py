"""Attention by definition, with the signature of torch's varlen attention, whose kernels need a GPU."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def plain_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The last query of a sequence is its last key's token."""
    assert (longest_q, longest_k) == (int(bounds_q.diff().max()), int(bounds_k.diff().max()))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    outputs: list[Tensor] = []
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True):
        scores = torch.einsum("thd,shd->hts", query[q0:q1], key[k0:k1]) * scale
        distance = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        hidden = distance < 0 if window_size[0] < 0 else (distance < 0) | (distance > window_size[0])
        outputs.append(torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value[k0:k1]))
    return torch.cat(outputs)
