"""The section ``reward``: how answers are scored, and how programs are judged (``reward.code``)."""

from __future__ import annotations

import math
import os
from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.reward_types import RewardType, reward_type
from async_rl.config.section import Section


class CodeRewardConfig(Section):
    """How the model's programs are run and judged: ``reward.code``."""

    time_limit_s: float = Field(default=10.0, gt=0, description="wall clock, of one test")
    total_time_limit_s: float = Field(default=60.0, gt=0, description="of all tests of one answer")
    memory_bytes: int = Field(default=1 << 30, ge=256 << 20, description="address space of a process")
    output_bytes: int = Field(default=16 << 20, ge=1 << 10, description="of standard output, and of any file")
    scratch_bytes: int = Field(default=64 << 20, ge=1 << 16, description="of all files of a program together")
    max_processes: int = Field(default=1, ge=1, le=256, description="1: a program can't start any; memory is for each")
    max_threads: int = Field(default=32, ge=1, le=1024)
    packages: tuple[str, ...] = Field(
        default=("numpy",),
        strict=False,
        description="imported beforehand; if any, programs may import all that is installed beside async-rl",
    )
    prelude: Literal["calls", "always", "never"] = Field(
        default="calls", description="names of common modules without an import: for functions only, or for scripts too"
    )
    compare: Literal["ordered", "cascade"] = Field(
        default="ordered", description="cascade: lines and tokens in any order too, as Colossal-RL has it"
    )
    partial_credit: bool = Field(default=False, description="reward and accuracy are the share of tests passed")
    workers: int | None = Field(default=None, ge=1, description="programs at a time; none: one a core")
    endpoint: str | None = Field(default=None, description="http://HOST:PORT of `async-rl verifier`; none: run here")
    allow_unsafe: bool = Field(default=False, description="run programs unprotected where they can't be isolated")

    @property
    def num_workers(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"expected an address like http://10.0.0.1:8000, got {value!r}")
        return value


class RewardConfig(Section):
    type: str = Field(
        default="boxed",
        description="boxed, think_answer_tags, exact, xml_format, code, or a function of yours: module:function or "
        "file.py:function, allowed by generator.allow_code",
    )
    scale: float = Field(default=1.0, gt=0, description="reward of a correct answer; times what type gives")
    equality: Literal["math", "exact"] = Field(
        default="math", description="of boxed and think_answer_tags: the same mathematics, or the same text"
    )
    require_format: bool = Field(default=True, description="a right answer in a wrong format earns nothing")
    format: float = Field(default=0.0, description="reward of a valid format, whatever the answer; not scaled")
    extra: dict[str, float] = Field(default={}, description="further rewards and the weight each is added with")
    soft_overlong: bool = Field(default=True, description="punish long answers, on a line over cache_length tokens")
    overlong: Literal["dapo", "zero_at_limit"] = Field(
        default="dapo",
        description="dapo: eq. 13, times scale, so cut answers lose 1 scale; zero_at_limit: the line only where there "
        "is an answer, and a reward of 0 for cut answers, even without soft_overlong",
    )
    cache_length: int | None = Field(default=None, ge=1, description="none: min(1024, max_new_tokens // 4)")
    time_limit_s: float = Field(default=5.0, gt=0, description="for comparing one answer, or one async call of yours")
    max_concurrent: int = Field(default=64, ge=1, le=1024, description="async calls of yours at the same time")
    code: CodeRewardConfig = CodeRewardConfig()

    @field_validator("type")
    @classmethod
    def _is_reward(cls, value: str) -> str:
        reward_type(value)
        return value

    @field_validator("extra")
    @classmethod
    def _are_rewards(cls, value: dict[str, float]) -> dict[str, float]:
        for name, weight in value.items():
            cls._is_reward(name)
            if weight == 0 or not math.isfinite(weight):
                raise ValueError(f"expected a weight other than 0 for {name}, got {weight}; leave it out instead")
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """Every reward that the run asks for, ``type`` first."""
        return (self.type, *self.extra)

    @property
    def types(self) -> tuple[RewardType, ...]:
        """The table's rows of all rewards that the run asks for, that of ``type`` first."""
        return tuple(reward_type(name) for name in self.names)

    @property
    def runs_programs(self) -> bool:
        """Whether one of the rewards needs a sandbox or a verifier."""
        return any(one.runs_programs for one in self.types)
