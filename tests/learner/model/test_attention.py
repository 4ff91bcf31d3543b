"""Attention of a row that ranks share. ``engine/test_fsdp_engine.py`` and ``tests/families`` compare whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from async_rl.learner.model import attention, split_attention
from async_rl.learner.model.attention import Attention, packed_attention_forward, packed_layout
from async_rl.learner.model.split_attention import Block
from tests.learner.model.split_attention import ROWS, tensors
from tests.learner.model.varlen import plain_varlen
from tests.learner.ranks import run_ranks


def bounds(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_buckets_hold_every_token_once_and_waste_little(lengths: list[int]):
    layout = packed_layout(bounds(lengths))
    buckets, restore = layout.padding
    places = torch.cat([b.gather for b in buckets])
    assert torch.equal(places[restore], torch.arange(sum(lengths)))
    assert sum(b.num_sequences for b in buckets) == len(lengths)
    assert layout.max_length == max(lengths)
    for bucket in buckets:
        held = places.new_tensor([len(set(row)) for row in bucket.gather.view(bucket.num_sequences, -1).tolist()])
        assert (bucket.max_length - held).max() <= max(16, bucket.max_length // 4)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_call_of_varlen_attention_is_right(window: int | None, is_shared: bool, monkeypatch: pytest.MonkeyPatch):
    # Shared: the second sequence begins with the first 5 tokens of the row.
    token_index = np.concatenate([np.arange(9), np.arange(5), np.arange(9, 12)]) if is_shared else None
    layout = packed_layout(bounds([9, 8]), token_index)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 12 if is_shared else 17, 8, generator=generator)
    key, value = (torch.randn(1, 2, query.shape[2], 8, generator=generator) for _ in range(2))

    def attend() -> Tensor:
        settings: Any = {"packed_layout": layout, "sliding_window": window}
        return packed_attention_forward(nn.Identity(), query, key, value, None, **settings)[0]

    padded = attend()
    monkeypatch.setattr(attention, "why_padded", lambda query, value: "")
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    torch.testing.assert_close(attend(), padded)


@pytest.mark.parametrize("num_key_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_torchs_own_varlen_attention_takes_our_call_forwards_and_backwards(num_key_heads: int, window: int | None):
    # On "meta" torch's function checks its arguments and makes results without values; its kernels need a GPU.
    shapes = [(17, 4, 8), (17, num_key_heads, 8), (17, num_key_heads, 8)]
    inputs = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    query, key, value = inputs
    places = attention.Places(torch.empty(3, device="meta", dtype=torch.int32), 9)
    out = attention.varlen(query, key, value, places, places, Attention(0.5, window))
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert [gradient.shape for gradient in torch.autograd.grad(out.sum(), inputs)] == [x.shape for x in inputs]


CPU = torch.device("cpu")


def block_of(row: str, start: int, stop: int) -> Block:
    bounds, index = ROWS[row]
    return Block.of(np.array(bounds), index, start, stop, CPU)


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
        monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    starts = range(0, layout.num_tokens, size)
    blocks = [block_of(row, start, start + size) for start in starts]
    parts = [b.attend(query[at : at + size], key, value, how) for b, at in zip(blocks, starts, strict=True)]
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.slow
def test_four_ranks_have_the_attention_of_one_with_any_number_of_heads(tmp_path: Path):
    run_ranks("split_attention", tmp_path, world_size=4)
