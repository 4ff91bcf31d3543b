"""Parts of runs that are wrong on purpose: rewards, advantages and engines, for ``health_runs.py``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from async_rl.config.config import Config
from async_rl.config.generator import BackendCapabilities
from async_rl.generator.backend import Sampled
from async_rl.generator.start.backends import FACTORIES
from async_rl.learner.losses.own_advantage import AdvantageInputs
from async_rl.rewards.records import RewardInput, RewardOutput


def constant(item: RewardInput) -> RewardOutput:
    return RewardOutput({"right": 1.0}, 1.0, "")


def zero(item: RewardInput) -> RewardOutput:
    return RewardOutput({"right": 0.0}, 0.0, "")


def noise(item: RewardInput) -> RewardOutput:
    value = float(random.random() < 0.5)
    return RewardOutput({"right": value}, value, "")


def negated(inputs: AdvantageInputs) -> np.ndarray:
    """The advantages of group_mean with the wrong sign."""
    advantages = np.zeros(len(inputs.rewards))
    for group in inputs.groups():
        advantages[group] = inputs.rewards[group].mean() - inputs.rewards[group]
    return advantages


class Hot:
    """Transformers' engine, which states the log-probabilities of half the temperature."""

    capabilities = BackendCapabilities(deterministic=False, has_model=True)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    def from_files(cls, directory: Path, config: Config, *, device: str | None, load_pretrained: bool) -> Any:
        return cls(FACTORIES["transformers"](directory, config, device=device, load_pretrained=load_pretrained))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self) -> list[Sampled]:
        return [self.changed(sampled) for sampled in self._inner.step()]

    def changed(self, sampled: Sampled) -> Sampled:
        return replace(sampled, logprobs=0.5 * sampled.logprobs)


class Shifted(Hot):
    """States each token's log-probability for the token after it, as with a mask that is off by one."""

    def changed(self, sampled: Sampled) -> Sampled:
        return replace(sampled, logprobs=np.roll(sampled.logprobs, 1))
