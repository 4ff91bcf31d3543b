"""The sections ``generator``, ``sampling`` and ``environment``: how rollouts for training are made.

They say which engine samples, where and how much at a time; with which settings; and which environment plays rollouts
of several turns. Evaluations have sampling keys of their own, in ``eval``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from async_rl.config.backends import AUTO, check_backend_name
from async_rl.config.section import Section
from async_rl.process.user_code import is_code_name


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

    @field_validator("backend")
    @classmethod
    def _is_known(cls, value: str) -> str:
        check_backend_name(value)
        return value


class SamplingConfig(Section):
    """How training rollouts are sampled; ``eval`` has its own keys."""

    group_size: int = Field(
        default=8, ge=1, le=1024, description="Number of rollouts that are sampled for each prompt."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Temperature by which logits are divided before sampling."
    )
    temperature_end: float | None = Field(
        default=None,
        gt=0,
        description="Temperature that is approached linearly from sampling.temperature; if unset, it stays constant.",
    )
    temperature_steps: int | None = Field(
        default=None,
        ge=1,
        description="Version of the weights at which temperature_end is reached; if unset, the last one of the run.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Sample only from the most likely tokens whose probabilities add up to this; 1 means all tokens.",
    )
    top_k: int = Field(
        default=0, ge=0, description="Sample only from this many most likely tokens; 0 means all tokens."
    )
    max_new_tokens: int = Field(
        default=3584,
        ge=1,
        description="Maximum number of tokens that the model may generate in one rollout, over all its turns.",
    )
    max_prompt_tokens: int = Field(
        default=512,
        ge=1,
        description="Maximum number of tokens of a prompt; data.on_long_prompt decides about longer ones.",
    )
    stop: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Strings that end a rollout when the model writes them; they stay in its text.",
    )
    deterministic: bool = Field(
        default=False,
        description="Whether every generator samples bit for bit the same rollouts, one group at a time, which is "
        "slow.",
    )


class EnvironmentConfig(Section):
    """Rollouts of several turns: your own code answers the model and scores it."""

    name: str = Field(
        default="",
        description="The environment: file.py, file.py:name, module or module:name. Every generator must list it in "
        "generator.allow_code. If empty, a rollout is one answer, scored by reward.type.",
    )
    max_turns: int = Field(
        default=8, ge=1, le=1024, description="Maximum number of answers of the model in one rollout."
    )
    max_turn_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens of one answer; if unset, whatever is left of sampling.max_new_tokens.",
    )
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time limit in seconds for one call of reset or step. A rollout whose call exceeds it fails.",
    )
    rows: int | None = Field(
        default=None,
        ge=1,
        description="Number of empty rows to train on instead of data.train, for environments that make their own "
        "tasks.",
    )
    extra: dict[str, Any] = Field(
        default={}, description="Settings of the environment's own, handed to it in extra_info."
    )

    @field_validator("name")
    @classmethod
    def _is_code(cls, value: str) -> str:
        if value and not is_code_name(value, needs_attribute=False):
            raise ValueError(f"expected file.py, file.py:name, module or module:name, got {value!r}")
        return value

    @property
    def is_set(self) -> bool:
        """Whether rollouts are played with an environment."""
        return bool(self.name)
