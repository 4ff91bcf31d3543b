"""A row that ranks share has the attention of the whole row."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.learner.model import attention, split_attention
from async_rl.learner.model.attention import Attention, packed_layout
from async_rl.learner.model.split_attention import Block
from tests.learner.model.split_attention import ROWS, tensors
from tests.learner.ranks import run_ranks

CPU = torch.device("cpu")


def block_of(row: str, start: int, stop: int) -> Block:
    bounds, index = ROWS[row]
    return Block.of(np.array(bounds), index, start, stop, CPU)


def test_a_block_is_cut_where_another_sequence_begins():
    # Tokens 7 and 8 end the first sequence, 9 to 11 the second (after 5 of the first), 12 begins the third's own.
    block = block_of("shared", 7, 13)
    assert (block.num_tokens, block.num_queries, block.num_keys) == (6, [2, 3, 1], [9, 8, 3])
    assert block.key_index.tolist() == [*range(9), *range(5), 9, 10, 11, 0, 1, 12]
    assert (block.of_queries.bounds.tolist(), block.of_queries.longest) == ([0, 2, 5, 6], 3)
    assert (block.of_keys.bounds.tolist(), block.of_keys.longest) == ([0, 9, 17, 20], 9)


def test_a_block_has_the_keys_up_to_its_last_token():
    block = block_of("alone", 2, 6)
    assert (block.num_queries, block.num_keys, block.key_index.tolist()) == ([4], [6], [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(("start", "stop", "num_tokens"), [(15, 20, 2), (17, 22, 0), (40, 44, 0)])
def test_a_block_may_reach_over_the_end_of_the_row(start: int, stop: int, num_tokens: int):
    block = block_of("alone", start, stop)
    assert block.num_tokens == num_tokens
    query, key, value, _ = tensors(17, 4, 2)
    key.requires_grad_()
    out = block.attend(query[start:stop], key, value, Attention(1.0))
    assert out.shape == (num_tokens, 4, 6)
    # Even without queries this rank takes part in the backward pass.
    (gradient,) = torch.autograd.grad(out.sum(), key)
    assert bool(gradient.any()) == bool(num_tokens)


def varlen_by_definition(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """As torch's varlen attention: the last query is the last key's token."""
    assert (longest_q, longest_k) == (int(bounds_q.diff().max()), int(bounds_k.diff().max()))
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    outputs: list[Tensor] = []
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True):
        scores = torch.einsum("thd,shd->hts", query[q0:q1], key[k0:k1]) * scale
        distance = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        hidden = distance < 0 if window_size[0] < 0 else (distance < 0) | (distance > window_size[0])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hts,shd->thd", weights, value[k0:k1]))
    return torch.cat(outputs)


@pytest.mark.parametrize("is_flash", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("row", ["alone", "shared"])
@pytest.mark.parametrize("size", [1, 4, 6])
def test_blocks_have_the_attention_of_the_whole_row(
    size: int, row: str, window: int | None, is_flash: bool, monkeypatch: pytest.MonkeyPatch
):
    bounds, index = ROWS[row]
    layout, how = packed_layout(np.array(bounds), index), Attention(0.4, window)
    query, key, value, _ = tensors(layout.num_tokens, 4, 2)
    expected = layout.attend(query, key, value, how)
    if is_flash:
        monkeypatch.setattr(split_attention, "why_padded", lambda query, value: "")
        monkeypatch.setattr(attention, "_varlen_attention", lambda: varlen_by_definition)
    starts = range(0, layout.num_tokens, size)
    blocks = [block_of(row, start, start + size) for start in starts]
    parts = [b.attend(query[at : at + size], key, value, how) for b, at in zip(blocks, starts, strict=True)]
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_of_a_block_agrees_with_its_masks(window: int | None, monkeypatch: pytest.MonkeyPatch):
    bounds, index = ROWS["shared"]
    block = Block.of(np.array(bounds), index, 7, 13, torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(14, heads, 64, generator=generator).cuda() for heads in (4, 2, 2))
    results: list[tuple[Tensor, ...]] = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [t.to(dtype).requires_grad_() for t in (query[7:13], key, value)]
        assert bool(split_attention.why_padded(leaves[0], leaves[2])) == (dtype == torch.float32)
        out = block.attend(leaves[0], leaves[1], leaves[2], Attention(0.125, window))
        results.append((out.float(), *torch.autograd.grad(out.float().square().sum(), leaves)))
    for masked, flash in zip(*results, strict=True):
        torch.testing.assert_close(flash.float(), masked, rtol=0.03, atol=0.03)


@pytest.mark.slow
def test_four_ranks_have_the_attention_of_one_with_any_number_of_heads(tmp_path: Path):
    run_ranks("split_attention", tmp_path, world_size=4)
