"""The section ``weights``: how and how often new weights reach the generators, and how they are checked."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Section


class WeightsConfig(Section):
    transport: Literal["auto", "tcp", "gloo", "nccl"] = Field(
        default="auto",
        description="auto: on one host or a trusted network nccl (learner on CUDA) or gloo, else tcp",
    )
    deltas: Literal["auto", "on", "off"] = Field(
        default="auto", description="tcp sends only what changed; auto: where generators are on other machines"
    )
    sync_every: int = Field(default=1, ge=1, description="publish every so many versions")
    deadline_s: float = Field(default=60.0, gt=0, description="a generator that is not done by then is dropped")
    bucket_bytes: int = Field(default=64 << 20, ge=1024, description="bytes of one digested part of a version")
    staging_bytes: int | None = Field(
        default=None, ge=1024, description="host memory for versions in flight; none: two (tcp: three)"
    )
    parity: Literal["stop", "warn", "off"] = Field(
        default="stop",
        description="when engine and learner give the same tokens other log-probabilities by the same weights",
    )
    parity_every: int = Field(
        default=50, ge=0, description="versions after which each generator is compared again; 0: at the start only"
    )
    parity_limit: float | None = Field(
        default=None,
        gt=0,
        description="of the mean difference, nats; none: 0.001 where both compute in float32, or 0.05",
    )
    trusted_network: bool = Field(
        default=False, description="nobody else is on the network: collectives allowed, tcp in the clear"
    )
