"""The sections ``learner`` and ``optimizer``: what one step trains on, on which devices, at which learning rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Section


class LearnerConfig(Section):
    steps: int = Field(default=1000, ge=1)
    groups_per_step: int = Field(default=32, ge=1)
    updates_per_batch: int = Field(
        default=1, ge=1, description="optimizer steps on each batch, on disjoint parts of it"
    )
    n_behind: int | None = Field(
        default=None, ge=0, le=1024, description="for studies: train on samples exactly so many versions old"
    )
    max_tokens: int = Field(default=16384, ge=1, description="tokens in one packed micro-batch of one rank")
    nproc: int = Field(default=1, ge=1, description="ranks that launch starts")
    devices: tuple[int, ...] | None = Field(default=None, strict=False, description="CUDA devices, one a rank")
    reshard: Literal["full", "none"] = Field(default="full", description="full: ZeRO-3; none: keep parameters gathered")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads a rank; none: cores over processes")
    distributed_timeout_s: float = Field(default=600.0, gt=0)


class OptimizerConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="floor of cosine and linear, times lr")
    warmup_steps: int = Field(default=0, ge=0)
