"""The section ``sampling``: how training rollouts are sampled. Evaluations have keys of their own."""

from __future__ import annotations

from pydantic import Field

from async_rl.config.section import Section


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
