"""The section ``environment``: what a rollout of several turns is played with. ``config.py`` checks it with others."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from async_rl.config_section import Section


class EnvironmentConfig(Section):
    name: str = Field(
        default="",
        description="file.py, file.py:name, module or module:name; empty: one answer a prompt, scored by reward.type",
    )
    digest: str = Field(
        default="", description="SHA-256 of its source, filled in where the run starts; generators check theirs"
    )
    max_turns: int = Field(default=8, ge=1, le=1024, description="answers of the model in one rollout")
    max_turn_tokens: int | None = Field(
        default=None, ge=1, description="in one answer; none: what sampling.max_new_tokens leaves"
    )
    timeout_s: float = Field(default=30.0, gt=0, description="of one reset or step; a slower rollout has failed")
    start_timeout_s: float = Field(default=120.0, gt=0, description="for importing it")
    rows: int | None = Field(default=None, ge=1, description="made-up empty rows, in place of data.train")
    extra: dict[str, Any] = Field(default={}, description="settings of its own, handed on in extra_info")

    @property
    def is_set(self) -> bool:
        return bool(self.name)
