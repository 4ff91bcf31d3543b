"""Flash attention against padded attention and against float32: values and gradients."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.learner.engine.attention import PackedLayout, packed_attention_forward, packed_layout, why_padded
from benchmarks.gpu_smoke.case import Machine

LENGTHS = (300, 7, 129)
# The second and third sequence share the first five tokens of the row.
SHARED = np.concatenate([np.arange(300), np.arange(5), np.arange(300, 302), np.arange(5), np.arange(302, 426)])
HEAD_DIMS = (32, 64, 128, 256)
HEADS = ((8, 8), (8, 2), (14, 2))
WINDOWS = (None, 64)
TOLERANCE = 0.02
"""Largest error relative to float32, of values and of each gradient; bfloat16 has 8 bits."""


def check(machine: Machine) -> str:
    """Compare attention in bfloat16 with float32 for every head size, grouping, window and shared prompt.

    On CUDA the attention in bfloat16 must be flash attention.
    """
    worst, count = 0.0, 0
    for head_dim, (num_heads, num_kv_heads), window, is_shared in product(HEAD_DIMS, HEADS, WINDOWS, (False, True)):
        layout = packed_layout(np.cumsum([0, *LENGTHS]), SHARED if is_shared else None, machine.device)
        torch.manual_seed(count)
        num_tokens = layout.num_tokens
        query, key, value = (
            torch.randn(1, heads, num_tokens, head_dim, device=machine.device, requires_grad=True)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        if machine.has_cuda:
            reason = why_padded(query.bfloat16(), value.bfloat16())
            assert not reason, f"expected flash attention for heads of {head_dim}, got padded, because {reason}"
        exact = _values(torch.float32, layout, window, query, key, value)
        rounded = _values(torch.bfloat16, layout, window, query, key, value)
        errors = [float((e - r).norm() / e.norm()) for e, r in zip(exact, rounded, strict=True)]
        where = f"heads {num_heads}/{num_kv_heads} of {head_dim}, window {window}, shared prompt {is_shared}"
        assert max(errors) < TOLERANCE, f"{where}: expected errors below {TOLERANCE}, got {errors}"
        worst, count = max(worst, *errors), count + 1
    kernel = "flash" if machine.has_cuda else "padded"
    return f"{kernel} in bfloat16 against float32, {count} shapes: largest error {worst:.4f}"


def _values(
    dtype: torch.dtype, layout: PackedLayout, window: int | None, query: Tensor, key: Tensor, value: Tensor
) -> list[Tensor]:
    """Return the output and the gradients of query, key and value, all float32."""
    q, k, v = (t.to(dtype) for t in (query, key, value))
    out, _ = packed_attention_forward(nn.Identity(), q, k, v, None, sliding_window=window, packed_layout=layout)
    gradients = torch.autograd.grad(out.float().square().sum(), (query, key, value))
    return [out.detach().float(), *gradients]
