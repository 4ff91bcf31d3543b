"""The sections ``model`` and ``lora``: what is trained, and which of its weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.section import Section


class ModelConfig(Section):
    path: str = Field(min_length=1, description="local directory or hub id of a Hugging Face causal LM")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype; auto: bfloat16 on CUDA, float32 on CPU"
    )
    trust_remote_code: bool = False
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass")


class LoraConfig(Section):
    """Adapters beside frozen weights: a layer's W becomes W + alpha / rank * B A, and only A and B are trained."""

    rank: int | None = Field(default=None, ge=1, description="columns of A; none: no adapters, every weight is trained")
    alpha: float = Field(default=16.0, gt=0, description="adapters are multiplied by alpha / rank")
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        strict=False,
        min_length=1,
        description="linear layers of the decoder that get an adapter, by the last part of their names",
    )

    @field_validator("targets")
    @classmethod
    def _are_last_parts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unfit = [name for name in names if not name or "." in name]
        if unfit or len(set(names)) < len(names):
            raise ValueError(f"expected the last parts of layers' names, each once, got {list(names)}")
        return names

    @property
    def is_set(self) -> bool:
        return self.rank is not None
