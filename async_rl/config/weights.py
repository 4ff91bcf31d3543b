"""The section ``weights``: how and how often new weights reach the generators, and how they are checked."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Section


class WeightsConfig(Section):
    """How a new version of the weights reaches the generators."""

    transport: Literal["auto", "tcp", "gloo", "nccl"] = Field(
        default="auto",
        description="How weights travel; auto is nccl (on CUDA) or gloo on one host or a trusted network, else tcp.",
    )
    deltas: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether tcp sends only what changed since the last version; auto does so to other machines only.",
    )
    sync_every: int = Field(default=1, ge=1, description="Publish every n-th version of the weights.")
    deadline_s: float = Field(
        default=60.0, gt=0, description="Seconds after which a generator that has not received a version is dropped."
    )
    staging_bytes: int | None = Field(
        default=None,
        ge=1024,
        description="Maximum bytes of host memory for versions that are being sent; if unset, room for two (tcp: "
        "three).",
    )
    parity: Literal["stop", "warn", "off"] = Field(
        default="stop",
        description="What happens if generator and learner compute different log-probabilities with the same weights.",
    )
    parity_limit: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean difference of those log-probabilities, in nats; if unset, 0.001 where both compute "
        "in float32, else 0.05.",
    )
    trusted_network: bool = Field(
        default=False,
        description="Whether the network is free of strangers, so that weights may travel unencrypted between "
        "machines.",
    )
