"""The learner's attention against the definition of attention: values and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.config.learner import FlashAttention
from async_rl.errors import ConfigError
from async_rl.learner.flash_attention import activate_flash_attention
from async_rl.learner.model.attention import PackedLayout, packed_attention_forward, packed_layout, why_padded
from benchmarks.gpu_smoke.case import Figure, Machine, NotRunError

LENGTHS = (300, 7, 129)
# The second and third sequence share the first five tokens of the row.
SHARED = np.concatenate([np.arange(300), np.arange(5), np.arange(300, 302), np.arange(5), np.arange(302, 426)])
HEAD_DIMS: dict[str, tuple[int, ...]] = {"cuda": (32, 64, 128, 256), "cpu": (32,)}
OTHERS_DIMS = (64, 128)
"""Those of most models, which flash attention 3 and 4 have in common."""
HEADS = ((8, 8), (8, 2), (14, 2))
WINDOWS = (None, 64)
TOLERANCE = {"bfloat16": 0.02, "float32": 1e-4}
"""Largest error relative to float32, of values and of each gradient; bfloat16 has 8 bits."""


def check_other(name: FlashAttention, machine: Machine) -> str:
    """Compare flash attention 3 or 4 with the definition.

    Raises:
        NotRunError: its package or GPU is not here.
    """
    try:
        activate_flash_attention(name, machine.device.index)
    except ConfigError as reason:
        raise NotRunError(str(reason)) from reason
    return f"{name}: {check(machine, OTHERS_DIMS)}"


def check(machine: Machine, head_dims: Sequence[int] = ()) -> str:
    """Compare attention with its definition for every head size, grouping, window and shared prompt.

    On CUDA the attention must be flash attention, in bfloat16.
    """
    worst, count, dtype = 0.0, 0, getattr(torch, machine.dtype)
    head_dims = head_dims or HEAD_DIMS[machine.device.type]
    for head_dim, (num_heads, num_kv_heads), window, is_shared in product(head_dims, HEADS, WINDOWS, (False, True)):
        rows = SHARED if is_shared else np.arange(sum(LENGTHS))
        layout = packed_layout(np.cumsum([0, *LENGTHS]), SHARED if is_shared else None, machine.device)
        torch.manual_seed(count)
        query, key, value = (
            torch.randn(1, heads, layout.num_tokens, head_dim, device=machine.device, requires_grad=True)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        if machine.has_cuda:
            reason = why_padded(query.bfloat16(), value.bfloat16())
            assert not reason, f"expected flash attention for heads of {head_dim}, got padded, because {reason}"
        exact = _with_gradients(_definition(query, key, value, torch.as_tensor(rows), window), query, key, value)
        found = _with_gradients(_packed(dtype, layout, window, query, key, value), query, key, value)
        errors = [float((e - f).norm() / e.norm()) for e, f in zip(exact, found, strict=True)]
        where = f"heads {num_heads}/{num_kv_heads} of {head_dim}, window {window}, shared prompt {is_shared}"
        tolerance = TOLERANCE[machine.dtype]
        assert max(errors) < tolerance, f"{where}: expected errors below {tolerance}, got {errors}"
        worst, count = max(worst, *errors), count + 1
    machine.figures["largest error"] = Figure(worst, "", f"below {TOLERANCE[machine.dtype]}")
    kernel = "flash" if machine.has_cuda else "padded"
    return f"{kernel} in {machine.dtype} against the definition, {count} shapes: largest error {worst:.1g}"


def _packed(
    dtype: torch.dtype, layout: PackedLayout, window: int | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    q, k, v = (t.to(dtype) for t in (query, key, value))
    out, _ = packed_attention_forward(nn.Identity(), q, k, v, None, sliding_window=window, packed_layout=layout)
    return out


def _definition(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, window: int | None) -> Tensor:
    """Return what the row's tokens must get, float32 [1, T, H, d]: each sequence alone, with all its products.

    ``rows`` [N] are the places in the row of the tokens of all sequences, one after the other.
    """
    times = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(times, 1) for t in (key, value))
    out = torch.zeros_like(query)
    for start, end in pairwise(np.cumsum([0, *LENGTHS]).tolist()):
        place = rows[start:end].to(query.device)
        q, k, v = (t[0, :, place] for t in (query, key, value))
        age = torch.arange(end - start)[:, None] - torch.arange(end - start)
        is_seen = (age >= 0) & (age < (window or end - start))
        scores = (q @ k.mT / query.shape[-1] ** 0.5).masked_fill(~is_seen.to(q.device), float("-inf"))
        # Of a shared token every sequence computes the same.
        out = out.index_copy(2, place, (scores.softmax(-1) @ v)[None])
    return out.transpose(1, 2)


def _with_gradients(out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return the output and the gradients of query, key and value, all float32."""
    gradients = torch.autograd.grad(out.float().square().sum(), (query, key, value))
    return [out.detach().float(), *gradients]
