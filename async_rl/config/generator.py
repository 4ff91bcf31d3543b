"""The section ``generator``: which engine samples, where and how much at a time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.backends import AUTO, check_backend_name
from async_rl.config.section import Section


class FakeConfig(Section):
    """Settings of the fake backend: it samples by hashing, at a pace of its own."""

    accuracy: float = Field(default=0.5, ge=0, le=1, description="share of correct answers")
    mean_tokens: float = Field(default=16.0, ge=1)
    sigma: float = Field(default=0.0, ge=0, description="of log-normal answer lengths")
    step_time_s: float = Field(default=0.0, ge=0, description="duration of one decode step, whatever the batch")
    vocab_size: int = Field(default=32, ge=2)
    fails_on: str = Field(default="", description="prompts that contain this text always fail; empty: none")


class VllmConfig(Section):
    """Settings of the vLLM backend that no other one has."""

    kv_cache_bytes: int | None = Field(
        default=None, ge=1 << 20, description="of keys and values; none: what memory_fraction leaves, on a CPU 1 GiB"
    )
    enforce_eager: bool | None = Field(default=None, description="no compiled graphs; none: on a CPU only")
    prepare_weights: bool = Field(
        default=True,
        description="on a CPU: a version is made ready beside decoding, in as much memory again; false: in a pause",
    )


class GeneratorConfig(Section):
    backend: str = Field(
        default=AUTO,
        description="inference engine: transformers, vllm, fake, or your own as module:Class or file.py:Class; auto: "
        "vllm with CUDA where vLLM is installed, else transformers",
    )
    count: int = Field(default=1, ge=0, description="generators that launch starts")
    devices: tuple[int, ...] | None = Field(default=None, strict=False, description="CUDA devices, dealt out in order")
    tensor_parallel_size: int = Field(default=1, ge=1)
    batch_size: int = Field(default=64, ge=1, description="sequences sampled at a time")
    max_concurrent_groups: int | None = Field(default=None, ge=1, description="none: as many as fill batch_size")
    memory_fraction: float = Field(default=0.8, gt=0, le=1, description="of the device's memory, vllm's to use")
    kv_after_swap: Literal["keep", "recompute"] = Field(
        default="keep",
        description="keys and values of running sequences when new weights are activated: kept, or computed anew",
    )
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads; none: cores over processes")
    allow_code: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="modules and files of yours that this machine's generators may import; never taken from the queue",
    )
    fake: FakeConfig = FakeConfig()
    vllm: VllmConfig = VllmConfig()

    @field_validator("backend")
    @classmethod
    def _is_known(cls, value: str) -> str:
        check_backend_name(value)
        return value
