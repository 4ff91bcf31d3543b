"""The section ``sampling``: how training rollouts are sampled. Evaluations have keys of their own."""

from __future__ import annotations

from pydantic import Field

from async_rl.config.section import Section


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
