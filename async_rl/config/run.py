"""The sections ``run``, ``checkpoint`` and ``log``: where a run lies and what it writes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.section import Section


class RunConfig(Section):
    dir: str = Field(min_length=1, description="run directory")
    name: str = Field(default="", description="shown in logs; empty: the directory's name")
    seed: int = Field(default=0, ge=0, lt=2**31)


class CheckpointConfig(Section):
    every: int = Field(default=50, ge=0, description="steps; 0: only at the end")
    keep_last: int = Field(default=2, ge=1)


class LogConfig(Section):
    wandb: Literal["off", "online", "offline"] = "off"
    project: str = "async-rl"
    rollouts_every: int = Field(default=10, ge=0, description="steps; 0: never")
    rollouts_groups: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=2, description="groups of the step's that are written, chosen at random"
    )
