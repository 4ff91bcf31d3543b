"""Frozen linear layers stored in 4 or 8 bits (``lora.base_bits``), for adapters to be trained on (QLoRA,
arXiv:2305.14314).

A layer stores codes and scales, and every pass computes its weights from them in the dtype of the layer's input. So the
weights that the learner computes with, merges and exports are the same tensor. 8 bits: each row's largest absolute
value becomes 127. 4 bits: bitsandbytes' NF4, one scale for 64 weights. Codes and scales are buffers, so FSDP, which
shards parameters, leaves them whole on every rank. Called by ``lora.py`` and ``export/``. Shape letters: O, I = a
layer's outputs and inputs.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_rl.errors import ModelError

BLOCK = 64
"""Number of weights with one scale, in 4 bits."""
_INT8_MAX = 127.0
_TRIAL_ERROR = 0.2
"""NF4's largest error is 0.15 of a block's largest weight: half of the widest gap between two of its 16 values."""


class QuantizedLinear(nn.Module):
    """A linear layer with frozen weights in ``bits`` bits on ``device``; ``bias`` stays as it is."""

    def __init__(self, weight_OI: Tensor, bias: nn.Parameter | None, *, bits: int, device: torch.device) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self._bits = bits
        codes, scales = _quantize(weight_OI.detach().to(device, torch.float32), bits)
        # Not persistent: checkpoints of adapters hold no frozen weights.
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_parameter("bias", bias)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the layer computes with for inputs of ``dtype``, [O, I]."""
        codes, scales = self.get_buffer("codes"), self.get_buffer("scales")
        if self._bits == 8:
            return (codes.to(torch.float32) * scales).to(dtype)
        bnb = _bitsandbytes()
        state = bnb.QuantState(
            absmax=scales, shape=torch.Size((self.out_features, self.in_features)), blocksize=BLOCK,
            quant_type="nf4", dtype=dtype,
        )  # fmt: skip
        return bnb.dequantize_4bit(codes, state)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + bias. ``x`` is [..., I], the result [..., O]."""
        product: Any = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """x W^T, which for its backward pass keeps the codes instead of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.dequantized(grad.dtype), None


def check_kernels(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check that weights can be stored in ``bits`` bits on ``device`` and computed from there in ``dtype``.

    Raises:
        ModelError: bitsandbytes is not installed, or has no kernel for this device and dtype.
    """
    place = f"{device.type} in {str(dtype).removeprefix('torch.')}"
    weight = torch.linspace(-1, 1, 2 * BLOCK).view(2, BLOCK)
    try:
        found = QuantizedLinear(weight, None, bits=bits, device=device).dequantized(dtype).float().cpu()
    except ModelError:
        raise
    except Exception as error:  # a missing kernel raises whatever torch's dispatcher or bitsandbytes does
        raise _no_kernel(bits, place, f"{type(error).__name__}: {error}") from error
    if (worst := float((found - weight).abs().max())) > _TRIAL_ERROR:
        raise _no_kernel(bits, place, f"stored weights between -1 and 1 came back changed by {worst:.2g}")


def _no_kernel(bits: int, place: str, reason: str) -> ModelError:
    return ModelError(
        f"lora.base_bits = {bits}: expected bitsandbytes to have a kernel for {place}, got none that works "
        f"({reason}); set lora.base_bits = 8, which needs no kernel, or leave the key out"
    )


def _quantize(weight_OI: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales: int8 [O, I] and float32 [O, 1], or uint8 [O I / 2, 1] and float32 [blocks]."""
    if bits == 8:
        scales = weight_OI.abs().amax(1, keepdim=True).clamp_min(1e-30) / _INT8_MAX
        return (weight_OI / scales).round().to(torch.int8), scales
    codes, state = _bitsandbytes().quantize_4bit(
        weight_OI.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False
    )
    return codes, state.absmax


def _bitsandbytes() -> Any:
    # It warns of a faster kernel for sampling on the CPU, which nothing here would use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional as bnb
    except ImportError as error:
        raise ModelError(
            f"lora.base_bits = 4 needs the package bitsandbytes, which can't be imported here ({error}): pip install "
            f"'async-rl[quantized]', or set lora.base_bits = 8"
        ) from error
    return bnb
