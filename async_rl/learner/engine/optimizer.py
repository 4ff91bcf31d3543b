"""Learning-rate schedule and AdamW. Called by ``fsdp_engine.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from async_rl.config.learner import OptimizerConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate as a pure function of the updates done, so that its state is one number.

    ``min_ratio`` times ``lr`` is the floor of cosine and linear, reached after ``total_updates``.
    """

    kind: Literal["constant", "cosine", "linear"]
    lr: float
    warmup_updates: int
    total_updates: int
    min_ratio: float

    def lr_at(self, num_updates: int) -> float:
        """The rate of the update that follows ``num_updates`` done ones; the first of a warm-up is not 0."""
        if num_updates < self.warmup_updates:
            return self.lr * (num_updates + 1) / self.warmup_updates
        if self.kind == "constant":
            return self.lr
        span = max(1, self.total_updates - self.warmup_updates)
        progress = min(1.0, (num_updates - self.warmup_updates) / span)
        share = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * share)


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig, lr: float) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay is for matrices only: norms and biases have nothing to be pulled to 0 for.

    Its state is made here, not at the first step, so that a fresh process has the tensors to load a checkpoint into.
    """
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=config.betas,
        fused=True,
    )
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer
