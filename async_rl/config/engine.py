"""How it is sampled: the sections ``sampling``, ``generator``, ``weights``. ``config.py`` checks them together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Section

VLLM_MIN_TEMPERATURE = 0.01
"""vLLM samples hotter than it was told below this."""


class SamplingConfig(Section):
    group_size: int = Field(default=8, ge=1, le=1024)
    temperature: float = Field(default=1.0, gt=0)
    temperature_end: float | None = Field(
        default=None, gt=0, description="what temperature goes to, on a line over the versions; none: it stays"
    )
    temperature_steps: int | None = Field(
        default=None, ge=1, description="version at which temperature_end is reached; none: the run's last"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the likeliest tokens that reach this probability; 1: off"
    )
    top_k: int = Field(
        default=0, ge=0, description="sample from so many of the likeliest tokens; 0: off. Bounds what top_p keeps"
    )
    max_new_tokens: int = Field(default=3584, ge=1)
    max_prompt_tokens: int = Field(default=512, ge=1, description="longer prompts: see data.on_long_prompt")
    stop: tuple[str, ...] = Field(default=(), strict=False, description="stop strings, kept in the text")
    deterministic: bool = Field(
        default=False, description="the same samples, bit for bit, whoever samples them; a group at a time, so slow"
    )


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
    backend: Literal["auto", "transformers", "vllm", "fake"] = Field(
        default="auto", description="auto: vllm with CUDA where vLLM is installed, else transformers"
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
