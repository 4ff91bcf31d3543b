"""Backends that forge, as generators of an untrusted fleet may run them. Each forges one thing, in every rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

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


class Biased(Honest):
    """Claims log-probabilities that are 0.01 nat too low. (Any above 0 the queue would refuse.)"""

    def forged(self, sample: Sampled) -> Sampled:
        return replace(sample, logprobs=sample.logprobs - np.float32(0.01))


class Changed(Honest):
    """Replaces a token of each rollout by another one, and claims what the sampled one had."""

    def forged(self, sample: Sampled) -> Sampled:
        token_ids = sample.token_ids.copy()
        at = len(token_ids) // 2
        token_ids[at] = 2 + (token_ids[at] + 5) % 20
        return replace(sample, token_ids=token_ids)


class Late(Honest):
    """Samples with the weights of the version before the one that it names."""

    _before: Mapping[str, Any] | None = None

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        before, self._before = self._before, {name: tensor.clone() for name, tensor in weights.items()}
        return super().activate(version, before or weights)


class Right(Honest):
    """Has the right answer in the text that is graded, whatever its tokens say. The rows' answers were published."""

    def forged(self, sample: Sampled) -> Sampled:
        prompt = self._tokenizer.decode(sample.prompt_ids.tolist(), skip_special_tokens=True)
        return replace(sample, text=f"\\boxed{{{sum(map(int, prompt.strip(' :').split('+')))}}}")


class Bfloat16(Honest):
    """Honest, in bfloat16: samples with weights that are rounded to 8 bits, and claims what it samples with."""

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        return super().activate(version, {name: t.bfloat16().to(t.dtype) for name, t in weights.items()})
