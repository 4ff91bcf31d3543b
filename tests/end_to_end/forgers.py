"""Backends of an untrusted fleet: one that forges, in every rollout, and an honest one in another dtype."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from async_rl.config.config import Config
from async_rl.config.generator import BACKENDS
from async_rl.generator.backend import Sampled
from async_rl.generator.hf.backend import TransformersBackend


class Honest(TransformersBackend):
    """Forges nothing."""

    capabilities = BACKENDS["transformers"]

    @classmethod
    def from_files(cls, directory: Path, config: Config, *, device: str | None, load_pretrained: bool) -> Honest:  # type: ignore[override]
        torch.set_num_threads(1)
        return super().from_files(
            directory, config.generator, device=device or "cpu", dtype=config.model.dtype,
            load_pretrained=load_pretrained,
        )  # type: ignore[return-value]  # fmt: skip

    def step(self) -> list[Sampled]:
        return [self.forged(sample) for sample in super().step()]

    def forged(self, sample: Sampled) -> Sampled:
        return sample


class Right(Honest):
    """Has the right answer in the text that is graded, whatever its tokens say. The rows' answers were published."""

    def forged(self, sample: Sampled) -> Sampled:
        prompt = self._tokenizer.decode(sample.prompt_ids.tolist(), skip_special_tokens=True)
        return replace(sample, text=f"\\boxed{{{sum(map(int, prompt.strip(' :').split('+')))}}}")


class Bfloat16(Honest):
    """Honest, in bfloat16: samples with weights that are rounded to 8 bits, and claims what it samples with."""

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        return super().activate(version, {name: t.bfloat16().to(t.dtype) for name, t in weights.items()})
