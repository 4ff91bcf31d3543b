"""A built-in engine whose weights are rounded, so that it samples with another policy than the learner trains.

A stand-in on the CPU for engines that sample in FP8 or INT4: the staleness study asks which correction holds. Each row
of a matrix is rounded to whole multiples of its largest entry over 2^(bits - 1) - 1; vectors stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from async_rl.generator.hf.backend import TransformersBackend


def rounded(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a matrix [O, I] with at most 2^bits - 1 values a row; tensors of other shapes as they are."""
    if weights.ndim != 2:
        return weights
    step = weights.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    return (weights / step).round() * step


class Int8Backend(TransformersBackend):
    """As ``transformers``, with weights of 8 bits."""

    bits: ClassVar[int] = 8

    @classmethod
    def from_files(
        cls, directory: Any, config: Any, *, device: Any = None, load_pretrained: bool = False, **_: Any
    ) -> Any:
        """Build it as a backend of the user's own, which gets the whole config."""
        data = config.data
        return super().from_files(
            directory, config.generator, device=device or "cpu", dtype=config.model.dtype,
            load_pretrained=load_pretrained, needs_template=data.prompt_format == "chat",
            template_arguments=data.template_arguments,
        )  # fmt: skip

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        return super().activate(version, {name: rounded(tensor, self.bits) for name, tensor in weights.items()})


class Int4Backend(Int8Backend):
    """As ``transformers``, with weights of 4 bits."""

    bits = 4
