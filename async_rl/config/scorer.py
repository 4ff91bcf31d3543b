"""The tables ``scorer.NAME``: frozen models that score what generators sampled, each in a process of its own.

``reward.model`` names the scorer of ``reward.type = "model"``. docs/rewards.md describes them.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from async_rl.config.section import Section, check_served_address

_MEMORY_FRACTION = 0.8


class ScorerConfig(Section):
    """A frozen model that scores what generators sampled, in a process of its own: one table for each, with any name.

    `async-rl scorer CONFIG NAME` is the process.
    """

    model: str = Field(
        description="The model: a directory or a Hugging Face id. For a reward, a sequence-classification model with "
        "one label.",
    )
    address: str = Field(
        description="Address that the scorer binds and generators connect to, as in tcp://127.0.0.1:5570. Beyond "
        "loopback it needs queue.keys.",
    )
    backend: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="Engine of a reward model. vllm computes what several answers share once. A teacher needs "
        "transformers.",
    )
    launch: bool = Field(
        default=True,
        description="Whether launch starts this scorer and restarts it. If false, start it with `async-rl scorer`.",
    )
    device: int | None = Field(
        default=None,
        ge=0,
        description="GPU of this scorer. If unset, launch takes one that no other process has, or the only one; "
        "without a GPU the CPU.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Precision of the model. auto: bfloat16 on a GPU, float32 on a CPU."
    )
    max_tokens: int = Field(
        default=16384,
        ge=1,
        description="Largest size of a batch, in tokens with their padding. A longer sequence is a batch of its own; "
        "vllm reads it in parts.",
    )
    memory_fraction: float = Field(
        default=_MEMORY_FRACTION,
        gt=0,
        le=1,
        description="Share of the GPU's memory that vllm may use. Lower it on a GPU that others use, too.",
    )
    digest: str | None = Field(
        default=None,
        description="The digest that the model must have, which the scorer logs at its start. If unset, that of the "
        "run's first start.",
    )

    @model_validator(mode="after")
    def _device_is_used(self) -> Self:
        if self.device is not None and not self.launch:
            raise ValueError(
                f"device: expected no value with launch = false, got {self.device}; set CUDA_VISIBLE_DEVICES where you "
                f"start the scorer"
            )
        return self

    @model_validator(mode="after")
    def _memory_fraction_is_used(self) -> Self:
        if self.backend != "vllm" and self.memory_fraction != _MEMORY_FRACTION:
            raise ValueError(
                f"memory_fraction: expected no value with backend {self.backend}, which does not read it, got "
                f'{self.memory_fraction}; leave it out, or set backend = "vllm"'
            )
        return self

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        return check_served_address(value)
