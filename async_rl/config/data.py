"""The section ``data``: which rows are trained on and evaluated, and what their fields are called."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.section import Section

PromptFormat = Literal["chat", "text"]


class ColumnsConfig(Section):
    """The names that the fields of a row have in the data, where they differ from ours."""

    messages: str = Field(
        default="messages", min_length=1, description="Column with the chat so far: a list of messages, or one message."
    )
    prompt: str = Field(
        default="prompt",
        min_length=1,
        description="Column with the prompt of rows without messages: text, or messages.",
    )
    gt_answer: str = Field(
        default="gt_answer", min_length=1, description="Column with the right answer, for rewards that compare answers."
    )
    test_cases: str = Field(
        default="test_cases", min_length=1, description="Column with the test inputs and outputs, for the code reward."
    )
    fn_name: str = Field(
        default="fn_name",
        min_length=1,
        description="Column with the name of the function that the tests call; rows without one test a whole program.",
    )
    extra_info: str = Field(
        default="extra_info",
        min_length=1,
        description="Column with further data, handed to environments and to your own rewards.",
    )


class DataConfig(Section):
    """The rows."""

    train: str = Field(
        default="",
        description="Training rows: a .jsonl, .json, .csv, .parquet or .arrow file, a directory, or "
        "[split@]owner/name[:config] on the Hugging Face hub; every command but sft needs it.",
    )
    eval: dict[str, str] = Field(
        default={}, description="Evaluation sets: a table from a name to rows, which are given as in data.train."
    )
    columns: ColumnsConfig = Field(default=ColumnsConfig(), description="Names of the columns, where they differ.")
    prompt_format: PromptFormat = Field(
        default="chat",
        description="Whether the prompt column is a user's message of a chat, or text that the model continues as is.",
    )
    on_long_prompt: Literal["drop", "truncate"] = Field(
        default="drop",
        description="What happens to prompts above sampling.max_prompt_tokens: they are skipped and counted, or the "
        "end of the last user message is cut.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        description="Passes over the training rows after which the run ends; if unset, learner.steps alone decides.",
    )
    system_prompt: str | None = Field(
        default=None,
        description="System message for rows without one; if unset, reward.type chooses it, and empty means none.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse", description="Whether a malformed row stops the run at its start or is skipped with a warning."
    )
    on_change: Literal["refuse", "accept"] = Field(
        default="refuse",
        description="Whether a run may resume although the training rows have changed since its checkpoint.",
    )
    shuffle: bool = Field(
        default=True, description="Whether every epoch has a new random order, which run.seed determines."
    )

    @field_validator("eval")
    @classmethod
    def _are_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:  # of files and metrics
            if re.fullmatch(r"\w[\w.+-]*", name) is None:
                raise ValueError(f"expected names of letters, digits and _ . + -, got {name!r}")
        return value
