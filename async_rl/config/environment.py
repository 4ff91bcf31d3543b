"""The section ``environment``: which environment plays rollouts of several turns."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from async_rl.config.section import Section
from async_rl.process.user_code import is_code_name


class EnvironmentConfig(Section):
    """Rollouts of several turns: your own code answers the model and scores it."""

    name: str = Field(
        default="",
        description="Environment as file.py, file.py:name, module or module:name, which generator.allow_code must "
        "list; if empty, a rollout is one answer that reward.type scores.",
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
        default=30.0, gt=0, description="Maximum seconds for one reset or step; a rollout that takes longer has failed."
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="Maximum seconds for importing the environment's code."
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
