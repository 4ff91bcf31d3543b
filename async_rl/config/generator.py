"""The section ``generator``: which engine samples, where and how much at a time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.backends import AUTO, check_backend_name
from async_rl.config.section import Section


class VllmConfig(Section):
    """Settings that only the vLLM backend has."""

    kv_cache_bytes: int | None = Field(
        default=None,
        ge=1 << 20,
        description="Bytes for cached keys and values; if unset, what memory_fraction leaves, and 1 GiB on a CPU.",
    )
    enforce_eager: bool | None = Field(
        default=None, description="Whether vLLM runs without compiled graphs; if unset, it does so only on a CPU."
    )


class GeneratorConfig(Section):
    """The inference engine of a generator. ``async-rl generator --set`` takes these keys, for one machine alone."""

    backend: str = Field(
        default=AUTO,
        description="Inference engine: transformers, vllm, fake (for tests), or your own as module:Class or "
        "file.py:Class; auto is vllm on CUDA if vLLM is installed, else transformers.",
    )
    count: int = Field(default=1, ge=0, description="Number of generators that launch starts.")
    devices: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        description="CUDA devices, dealt out in order to the generators that launch starts; if unset, the first ones.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Number of devices over which vLLM splits the model of one generator."
    )
    batch_size: int = Field(
        default=64, ge=1, description="Maximum number of sequences that one generator samples at the same time."
    )
    max_concurrent_groups: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of groups in flight on one generator; if unset, as many as fill batch_size.",
    )
    memory_fraction: float = Field(
        default=0.8, gt=0, le=1, description="Share of the device's memory that vLLM may use."
    )
    kv_after_update: Literal["keep", "recompute"] = Field(
        default="keep",
        description="What happens to the cached keys and values of running sequences after a weight update.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of each generator; if unset, the cores divided by the processes of the run.",
    )
    allow_code: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Your own modules and files that generators on this machine may import; a queue server can't "
        "extend it.",
    )
    vllm: VllmConfig = Field(default=VllmConfig(), description="Settings that only the vLLM backend has.")

    @field_validator("backend")
    @classmethod
    def _is_known(cls, value: str) -> str:
        check_backend_name(value)
        return value
