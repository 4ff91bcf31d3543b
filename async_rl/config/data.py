"""The sections ``data`` and ``eval``: which rows are trained on, which are evaluated, and how those are answered.

``[eval]`` holds for every set of ``data.eval``; ``[eval.sets.NAME]`` overrides it for one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
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
        default={}, description="Evaluation sets: a table of NAME = SOURCE. A source has the same form as data.train."
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


@dataclass(frozen=True, slots=True)
class EvalSet:
    """How one set is answered, defaults applied. ``max_new_tokens`` None: as in training; ``max_rows`` None: all."""

    every: int
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None
    max_rows: int | None


class EvalSetConfig(Section):
    """Keys of ``eval`` for one evaluation set; those that are unset are as in ``eval``."""

    every: int | None = Field(
        default=None, ge=0, description="Steps between two evaluations of this set; if unset, eval.every."
    )
    num_samples: int | None = Field(
        default=None, ge=1, le=1024, description="Answers to each row of this set; if unset, eval.num_samples."
    )
    temperature: float | None = Field(
        default=None, ge=0, description="Temperature for this set; if unset, eval.temperature."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Top-p for this set; if unset, eval.top_p.")
    top_k: int | None = Field(default=None, ge=0, description="Top-k for this set; if unset, eval.top_k.")
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens of an answer to this set; if unset, eval.max_new_tokens.",
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Number of rows of this set, the first ones; if unset, eval.max_rows."
    )


class EvalConfig(Section):
    """When and how the sets of ``data.eval`` are answered."""

    every: int = Field(
        default=50,
        ge=0,
        description="Steps between two evaluations; 0 evaluates only before the first and after the last step.",
    )
    num_samples: int = Field(default=1, ge=1, le=1024, description="Number of answers that are sampled for each row.")
    temperature: float = Field(default=0.0, ge=0, description="Temperature of evaluations; 0 is greedy decoding.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Top-p of evaluations; sampling.top_p does not apply to them."
    )
    top_k: int = Field(default=0, ge=0, description="Top-k of evaluations; sampling.top_k does not apply to them.")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Maximum number of tokens of an answer; if unset, sampling.max_new_tokens."
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Number of rows of each set, the first ones; if unset, all rows."
    )
    majority: bool | None = Field(
        default=None,
        description="Whether a majority vote over the answers to a row is reported; if unset, where reward.type "
        "extracts answers.",
    )
    sets: dict[str, EvalSetConfig] = Field(
        default={}, description="Keys that differ for single sets: a table from a name of data.eval to such keys."
    )

    def of(self, name: str) -> EvalSet:
        """How the set called ``name`` is answered."""
        own = self.sets.get(name) or EvalSetConfig()
        chosen = {field.name: getattr(own, field.name) for field in fields(EvalSet)}
        return EvalSet(**{key: getattr(self, key) if value is None else value for key, value in chosen.items()})
