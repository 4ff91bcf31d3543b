"""The sections ``model``, ``lora`` and ``weights``: what is trained, and how its new weights reach the generators."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.section import Section


class ModelConfig(Section):
    """The model that is trained and sampled."""

    path: str = Field(
        min_length=1,
        description="Local directory or Hugging Face hub id of a causal language model with its tokenizer.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Precision in which learner and generators compute; auto is bfloat16 on CUDA and float32 on a CPU.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether Python code that comes with the model or its tokenizer may be executed."
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Whether the learner recomputes activations in the backward pass, which saves memory and costs "
        "time.",
    )


class LoraConfig(Section):
    """Low-rank adapters: a layer's W becomes W + alpha / rank * B A, and only A and B are trained."""

    rank: int | None = Field(
        default=None, ge=1, description="Rank of the adapters; if unset, there are none and every weight is trained."
    )
    alpha: float = Field(default=16.0, gt=0, description="Scale of the adapters, which are multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        strict=False,
        min_length=1,
        description="Linear layers of the decoder that get an adapter, each given by the last part of its name.",
    )

    @field_validator("targets")
    @classmethod
    def _are_last_parts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unfit = [name for name in names if not name or "." in name]
        if unfit or len(set(names)) < len(names):
            raise ValueError(
                f"expected each layer once, by the last part of its name, such as q_proj, got {list(names)}"
            )
        return names

    @property
    def is_set(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.rank is not None


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
    trusted_network: bool = Field(
        default=False,
        description="Whether all machines on the network are trusted, so that weights may travel unencrypted.",
    )
