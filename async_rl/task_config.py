"""What is learnt: the sections ``data``, ``reward``, ``eval``. ``config.py`` checks them against the others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config_section import Section

RewardType = Literal["boxed", "think_answer_tags"]

SYSTEM_PROMPTS: dict[str, str] = {
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "think_answer_tags": (
        "You are a helpful assistant. You first think about the reasoning process inside <think> </think>, then give "
        "the final answer inside <answer> </answer>, without any explanation there, for example "
        "<answer> 123 </answer>. The user asks a maths problem.\n\n"
    ),
}
"""What a row without a system message of its own is told, by reward type."""


class DataConfig(Section):
    train: str = Field(default="", description="training rows, JSONL; needed by every role but sft")
    eval: dict[str, str] = Field(default={}, description="dataset name -> file")
    epochs: int | None = Field(default=None, ge=1, description="end the run after so many passes; none: learner.steps")
    system_prompt: str | None = Field(default=None, description="none: by reward type; empty: no system message")
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    on_change: Literal["refuse", "accept"] = Field(
        default="refuse", description="when the training file is another one than at the checkpoint"
    )
    shuffle: bool = Field(default=True, description="a new seeded order every epoch")


class RewardConfig(Section):
    type: RewardType = "boxed"
    scale: float = Field(default=1.0, gt=0, description="reward of a correct answer")
    soft_overlong: bool = Field(default=True, description="punish long answers, on a line over cache_length tokens")
    overlong: Literal["dapo", "zero_at_limit"] = Field(
        default="dapo",
        description="dapo: eq. 13, times scale, so cut answers lose 1 scale; zero_at_limit: the line only where there "
        "is an answer, and a reward of 0 for cut answers, even without soft_overlong",
    )
    cache_length: int | None = Field(default=None, ge=1, description="none: min(1024, max_new_tokens // 4)")
    time_limit_s: float = Field(default=5.0, gt=0, description="per answer")


class EvalConfig(Section):
    every: int = Field(default=50, ge=0, description="steps; 0: only at the start and the end")
    temperature: float = Field(default=0.0, ge=0)
    num_samples: int = Field(default=1, ge=1)
    max_rows: int | None = Field(default=None, ge=1, description="the first rows of each dataset; none: all")
