"""The section ``environment``: what a rollout of several turns is played with. ``config.py`` checks it with others."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from async_rl.config.section import Section
from async_rl.process.user_code import is_code_name


class EnvironmentConfig(Section):
    name: str = Field(
        default="",
        description="file.py, file.py:name, module or module:name, allowed by generator.allow_code; empty: one answer "
        "a prompt, scored by reward.type",
    )
    max_turns: int = Field(default=8, ge=1, le=1024, description="answers of the model in one rollout")
    max_turn_tokens: int | None = Field(
        default=None, ge=1, description="in one answer; none: what sampling.max_new_tokens leaves"
    )
    timeout_s: float = Field(default=30.0, gt=0, description="of one reset or step; a slower rollout has failed")
    start_timeout_s: float = Field(default=120.0, gt=0, description="for importing it")
    rows: int | None = Field(default=None, ge=1, description="made-up empty rows, in place of data.train")
    extra: dict[str, Any] = Field(default={}, description="settings of its own, handed on in extra_info")

    @field_validator("name")
    @classmethod
    def _is_code(cls, value: str) -> str:
        if value and not is_code_name(value, needs_attribute=False):
            raise ValueError(f"expected file.py, file.py:name, module or module:name, got {value!r}")
        return value

    @property
    def is_set(self) -> bool:
        return bool(self.name)
