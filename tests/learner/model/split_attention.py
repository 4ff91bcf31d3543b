"""Attention of a row that ranks share, compared with that of the whole row on one rank."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from async_rl.learner.model.attention import Attention, packed_layout
from async_rl.learner.model.split_attention import PartLayout
from async_rl.learner.ranks import init_ranks
from tests.learner.tiny import tiny_config

ROWS: dict[str, tuple[list[int], np.ndarray]] = {
    "alone": ([0, 9, 17], np.arange(17)),
    # The second sequence begins with 5 tokens of the first, the third with 2.
    "shared": ([0, 9, 17, 21], np.array([*range(9), *range(5), *range(9, 12), 0, 1, 12, 13])),
    # Fewer tokens than ranks: the last has padding only.
    "short": ([0, 2, 3], np.arange(3)),
}
"""Row -> where its sequences begin, and the place in the row of each of their tokens."""
HEADS = ((4, 2), (8, 8), (2, 1), (6, 3), (3, 1))
"""Query heads, key and value heads. Four ranks divide the first two; of the others two, two and one divide the heads.
"""


def tensors(num_tokens: int, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value [T, heads, 8 or 6], and the weights of the output in the loss."""
    generator = torch.Generator().manual_seed(num_heads)
    shapes = ((num_heads, 8), (num_kv_heads, 8), (num_kv_heads, 6), (num_heads, 6))
    query, key, value, weights = (torch.randn(num_tokens, *shape, generator=generator) for shape in shapes)
    return query, key, value, weights


def compare_parts(directory: Path) -> None:
    """What each of four ranks does: output and gradients of its part, for every row, number of heads and window."""
    ranks = init_ranks(tiny_config(directory, "model"))
    for row, (num_heads, num_kv_heads), window in product(ROWS, HEADS, (None, 3)):
        bounds, index = np.array(ROWS[row][0]), ROWS[row][1]
        whole = packed_layout(bounds, index)
        how = Attention(0.4, window)
        *inputs, weights = tensors(whole.num_tokens, num_heads, num_kv_heads)
        leaves = [t.clone().requires_grad_() for t in inputs]
        expected = whole.attend(leaves[0], leaves[1], leaves[2], how)
        wanted = torch.autograd.grad((expected * weights).sum(), leaves)

        size = -(-whole.num_tokens // ranks.world_size)
        part = PartLayout(
            whole, size, ranks.rank, ranks.world_size, cast(dist.ProcessGroup, dist.group.WORLD), bounds, index,
            torch.device("cpu"),
        )  # fmt: skip
        own = slice(ranks.rank * size, (ranks.rank + 1) * size)

        def padded(tensor: Tensor, value: float = 0.0, own: slice = own, size: int = size) -> Tensor:
            return pad(tensor[own], (0, 0, 0, 0, 0, size - len(tensor[own])), value=value)

        # What stands in the padding reaches nothing.
        mine = [padded(t, 7.0).requires_grad_() for t in inputs]
        out = part.attend(mine[0], mine[1], mine[2], how)
        gradients = torch.autograd.grad((out * padded(weights)).sum(), mine)
        where = f"{row}, {num_heads} and {num_kv_heads} heads, window {window}: "
        for got, want in ((out, expected.detach()), *zip(gradients, wanted, strict=True)):
            torch.testing.assert_close(got.detach(), padded(want), msg=lambda m, w=where: w + m)
    ranks.close()
