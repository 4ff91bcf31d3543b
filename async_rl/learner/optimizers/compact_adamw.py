"""AdamW whose running means take less memory. Called by ``optimizer.py``.

The weights are float32, and so is the arithmetic: a step takes a shard piece by piece, reads the piece's means as
float32, lets torch's fused AdamW update means and weights, and stores the means again. ``Bfloat16`` and ``EightBit``
say how they are stored. Shape letters: O, I = a matrix's rows and columns on this rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from async_rl.config.learner import OptimizerConfig
from async_rl.errors import ConfigError

PIECE = 1 << 22
"""Largest number of weights in a piece, unless one row has more. Their float32 means take 32 MB."""

BLOCK = 64
"""Number of values of a row that have one scale in ``EightBit``, the smallest that bitsandbytes has everywhere."""


class CompactAdamW:
    """AdamW on matrices, whose means have another ``storage`` than float32. It implements ``optimizer.Optimizer``."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, storage: Bfloat16 | EightBit
    ) -> None:
        self._parameters, self._config, self._storage = parameters, config, storage
        self._state = {name: storage.zeros(parameter) for name, parameter in parameters.items()}
        self._num_updates = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._update(name, parameter, lr)
        self._num_updates += 1

    def _update(self, name: str, parameter: nn.Parameter, lr: float) -> None:
        assert parameter.grad is not None
        weights = local(parameter)
        if not weights.numel():
            return
        generator = torch.Generator(weights.device).manual_seed(_seed(self._num_updates, name, parameter))
        tensors = [local(parameter.grad).contiguous(), *(local(t) for t in self._state[name].values())]
        rows = max(1, PIECE // weights.shape[-1])
        pieces = [t.view(-1, t.shape[-1]).split(rows) for t in (weights, *tensors)]
        for weight, gradient, *stored in zip(*pieces, strict=True):
            means = self._storage.read(stored)
            # torch counts the step that it makes.
            count = torch.full((), float(self._num_updates), device=weight.device)
            beta1, beta2 = self._config.betas
            adamw(
                [weight], [gradient], means[:1], means[1:], [], [count],
                fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr,
                weight_decay=self._config.weight_decay, eps=1e-8, maximize=False,
            )  # fmt: skip
            self._storage.write(stored, means, generator)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{kind}.{name}": tensor for name, state in self._state.items() for kind, tensor in state.items()}

    def resume(self, num_updates: int) -> None:
        self._num_updates = num_updates


class Bfloat16:
    """Means in bfloat16, rounded up or down at random, so that they are right on average.

    Rounding to the nearest number would stop the mean of the square: it changes by 0.1 % a step at beta2 = 0.999, and
    bfloat16 has steps of 0.4 to 0.8 %.
    """

    def zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that store means of 0 for the matrices ``parameter``, sharded as it is, by their kind."""
        return {kind: torch.zeros_like(parameter, dtype=torch.bfloat16) for kind in ("exp_avg", "exp_avg_sq")}

    def read(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Return both means of a piece, float32. ``stored`` are the piece's rows of the tensors of ``zeros``."""
        return [mean.float() for mean in stored]

    def write(self, stored: Sequence[Tensor], means: Sequence[Tensor], generator: torch.Generator) -> None:
        """Store both means of a piece into ``stored``, with random numbers of ``generator``."""
        for target, mean in zip(stored, means, strict=True):
            target.copy_(rounded_at_random(mean, generator))


def rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 ``values`` in bfloat16, each rounded to one of its neighbours so that the expectation is exact."""
    noise = torch.randint(0, 1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    # A bfloat16 is the upper half of a float32. The lower half is the probability that the sum carries.
    return ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


class EightBit:
    """Means in 8-bit codes of bitsandbytes, with a float32 scale for every ``BLOCK`` values of a row
    (arXiv:2110.02861). Its methods are those of ``Bfloat16``.

    There the blocks are cut from the whole tensor. Here a block is part of one row, so a checkpoint can be loaded on
    another number of ranks, which divide the rows. And no mean of a square is rounded to 0, because the quotient of the
    means would explode.
    """

    def __init__(self, device: torch.device) -> None:
        """Use the kernels of ``device``.

        Raises:
            ConfigError: bitsandbytes is missing, or has no kernels for the device.
        """
        self._functions = bitsandbytes_functions(device)
        self._codes = [self._functions.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        self._codes[1][0] = self._codes[1][1] / 2

    def zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        codes, scales = torch.zeros_like(parameter, dtype=torch.uint8), _zero_scales(parameter)
        return {
            "exp_avg_codes": codes,
            "exp_avg_scales": scales,
            "exp_avg_sq_codes": codes.clone(),
            "exp_avg_sq_scales": scales.clone(),
        }

    def read(self, stored: Sequence[Tensor]) -> list[Tensor]:
        means = []
        for code, codes_OI, scales in zip(self._codes, stored[::2], stored[1::2], strict=True):
            padded = nn.functional.pad(codes_OI, (0, -codes_OI.shape[1] % BLOCK))
            mean = self._functions.dequantize_blockwise(padded, absmax=scales.flatten(), code=code, blocksize=BLOCK)
            means.append(mean[:, : codes_OI.shape[1]].contiguous())
        return means

    def write(self, stored: Sequence[Tensor], means: Sequence[Tensor], generator: torch.Generator) -> None:
        for code, codes_OI, scales, mean in zip(self._codes, stored[::2], stored[1::2], means, strict=True):
            padded = nn.functional.pad(mean, (0, -mean.shape[1] % BLOCK))
            codes, state = self._functions.quantize_blockwise(padded, code=code, blocksize=BLOCK)
            codes_OI.copy_(codes[:, : codes_OI.shape[1]])
            scales.copy_(state.absmax.view_as(scales))


def _zero_scales(parameter: Tensor) -> Tensor:
    """Return scales of 0 for the blocks of ``parameter``, sharded as it is."""
    part = local(parameter)
    zeros = torch.zeros(*part.shape[:-1], -(-part.shape[-1] // BLOCK), device=part.device)
    if not isinstance(parameter, DTensor):
        return zeros
    # Ranks that divide the columns have blocks of their own.
    num_parts = parameter.shape[-1] // max(1, part.shape[-1])
    shape = torch.Size((*parameter.shape[:-1], zeros.shape[-1] * num_parts))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def bitsandbytes_functions(device: torch.device) -> Any:
    """Return bitsandbytes' functions on blocks of 8-bit codes, tried on ``device``.

    Raises:
        ConfigError: bitsandbytes is missing, or has no kernels for the device.
    """
    try:
        functions = importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # not only ImportError: it loads a library of its own
        raise ConfigError(
            f'optimizer.name = "adamw_8bit": expected the package bitsandbytes, got {type(error).__name__}: {error}; '
            f"install it with: pip install 'async-rl[quantized]', or choose \"adamw_bf16\""
        ) from error
    try:
        functions.quantize_blockwise(torch.zeros(BLOCK, device=device), blocksize=BLOCK)
    except Exception as error:  # each backend has errors of its own
        raise ConfigError(
            f'optimizer.name = "adamw_8bit": bitsandbytes has no kernels for {device}: {type(error).__name__}: '
            f'{error}; choose "adamw_bf16"'
        ) from error
    return functions


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _seed(num_updates: int, name: str, parameter: Tensor) -> int:
    """Return a seed for a step of a shard: the same after a resume, and on all ranks that hold the same shard."""
    place: list[int] = []
    if isinstance(parameter, DTensor):
        coordinates = parameter.device_mesh.get_coordinate() or ()
        place = [c for c, p in zip(coordinates, parameter.placements, strict=True) if not p.is_replicate()]
    return xxhash.xxh3_64_intdigest(f"{num_updates} {place} {name}".encode())
