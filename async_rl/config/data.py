"""The section ``data``: which rows are trained on and evaluated, and what their fields are called."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.section import Section

PromptFormat = Literal["chat", "text"]


class ColumnsConfig(Section):
    """What the keys of a row are called in the data."""

    messages: str = Field(default="messages", min_length=1, description="the chat so far, or one message of it")
    prompt: str = Field(default="prompt", min_length=1, description="instead: text, or messages")
    gt_answer: str = Field(default="gt_answer", min_length=1, description="right answer of a math row")
    test_cases: str = Field(default="test_cases", min_length=1, description="inputs and outputs of a code row")
    fn_name: str = Field(default="fn_name", min_length=1, description="function that the tests call; none: stdin")
    extra_info: str = Field(default="extra_info", min_length=1, description="for environments and rewards of yours")


class DataConfig(Section):
    train: str = Field(
        default="",
        description="training rows: a .jsonl, .json, .csv, .parquet or .arrow file, a directory, or "
        "[split@]owner/name[:config] of the hub; needed by every role but sft",
    )
    eval: dict[str, str] = Field(default={}, description="dataset name -> rows, as for train")
    columns: ColumnsConfig = Field(default=ColumnsConfig(), description="what the data calls them")
    prompt_format: PromptFormat = Field(
        default="chat", description="a prompt column is a user's message, or text to be continued without a template"
    )
    on_long_prompt: Literal["drop", "truncate"] = Field(
        default="drop",
        description="beyond sampling.max_prompt_tokens: set aside and counted, or the end of the last user message cut",
    )
    epochs: int | None = Field(default=None, ge=1, description="end the run after so many passes; none: learner.steps")
    system_prompt: str | None = Field(default=None, description="none: by reward type; empty: no system message")
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    on_change: Literal["refuse", "accept"] = Field(
        default="refuse", description="when the training file is another one than at the checkpoint"
    )
    shuffle: bool = Field(default=True, description="a new seeded order every epoch")

    @field_validator("eval")
    @classmethod
    def _are_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:  # of files and metrics
            if re.fullmatch(r"\w[\w.+-]*", name) is None:
                raise ValueError(f"expected names of letters, digits and _ . + -, got {name!r}")
        return value
