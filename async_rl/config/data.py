"""The sections ``data`` and ``eval``: the rows to train on and to evaluate on, and how evaluations are answered.

The keys of ``[eval]`` are for every set of ``data.eval``. ``[eval.sets.NAME]`` changes them for the set ``NAME``.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_serializer, field_validator, model_validator

from async_rl.config.section import CodeName, Free, OnResume, Recorded, Section

PromptFormat = Literal["chat", "text"]


RowField = Literal["messages", "prompt", "tools", "gt_answer", "test_cases", "fn_name", "extra_info"]
"""The fields of a row that async-rl reads; docs/data.md describes them. ``data.columns`` renames them."""


CONTENT_KEY = "special_tokens_in_content"
"""The key among a chat template's arguments that is no variable of the template: the config key of this name."""
_MAX_WEIGHT = 1000
"""The order in which sources take turns has one entry for each unit of all weights."""

SET_BY_US = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", CONTENT_KEY,
})  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that are no variables of a template, or that async-rl sets."""


def parse_tools(text: str) -> list[Any]:
    """Return the tool schemas in ``text``, the JSON text of a list of objects.

    Raises:
        ValueError: ``text`` is anything else.
    """
    try:
        tools = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"expected a JSON list of tool schemas, got text that is not JSON ({error}): {text[:40]!r}; correct it"
        ) from None
    if not isinstance(tools, list) or not tools or not all(isinstance(one, dict) and one for one in tools):
        raise ValueError(
            f"expected a JSON list of tool schemas, each an object such as "
            f'{{"type": "function", "function": {{"name": ...}}}}, got {text[:60]!r}; correct it'
        )
    return tools


class CurriculumConfig(Section):
    """Which training prompts are sampled again, and how often, by the mean accuracy of their last group."""

    chance: Literal["uniform", "learnability", "failures"] = Field(
        default="uniform",
        description="Probability with which a prompt is sampled when its turn comes, by its pass rate p: 1 "
        "(uniform), 4p(1-p) (learnability), or 1-p (failures). Prompts that were never sampled always are.",
    )
    min_chance: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Lowest probability of learnability and failures, so that no prompt is lost.",
    )
    solved_at: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Prompts with at least this pass rate are set aside for rest_epochs; if unset, none are.",
    )
    unsolved_at: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Prompts with at most this pass rate are set aside for rest_epochs; if unset, none are.",
    )
    rest_epochs: int = Field(
        default=2,
        ge=1,
        description="Number of epochs of its source in which a prompt that was set aside is left out.",
    )

    @property
    def is_on(self) -> bool:
        """Whether any prompt may be passed over."""
        return self.chance != "uniform" or self.solved_at is not None or self.unsolved_at is not None


class DataConfig(Section):
    """The rows to train and to evaluate on."""

    train: str | dict[str, str] = Field(
        default="",
        description="Training rows: a .jsonl, .json, .csv, .parquet or .arrow file, a directory, or "
        "[split@]owner/name[:config] on the Hugging Face hub; or several of these, as a table of NAME = SOURCE. "
        "sft, rm and dpo have datasets of their own.",
    )
    source: CodeName | None = Field(
        default=None,
        description="Your own source of training rows as module:function or file.py:function, in place of data.train "
        '(docs/data.md, "Prompts of your own").',
    )
    weights: dict[str, int] = Field(
        default={},
        description="Shares of the sources of data.train: a table of NAME = NUMBER with whole numbers from 1 to "
        f"{_MAX_WEIGHT}. If unset, the rows of all sources are shuffled together.",
    )
    eval: Recorded[dict[str, str]] = Field(
        default={}, description="Evaluation sets: a table of NAME = SOURCE. A source has the same form as data.train."
    )
    columns: dict[RowField, Annotated[str, Field(min_length=1)]] = Field(
        default={},
        description="Columns of the data that have other names: a table FIELD = COLUMN. A COLUMN with dots names a "
        f"value inside an object. The fields are {', '.join(get_args(RowField))}.",
    )
    prompt_format: PromptFormat = Field(
        default="chat",
        description="Whether the prompt column is a user's message of a chat, or text that the model continues as is.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="Further variables for the model's chat template, such as enable_thinking = false. A variable that "
        "the template does not read is refused.",
    )
    ignore: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Columns of the data that are left out before a row is read, also by sft, rm and dpo.",
    )
    special_tokens_in_content: Literal["text", "token"] = Field(
        default="text",
        description="What a special token becomes that a message's content spells, such as <|im_end|>: text, or the "
        "token. In an answer only those that open or end a turn are text.",
    )
    tools: str = Field(
        default="",
        description="JSON file of tool schemas that the chat template shows to the model with every prompt. A row's "
        "own column tools has precedence.",
    )
    on_long_prompt: Literal["drop", "truncate"] = Field(
        default="drop",
        description="What happens to prompts of more than sampling.max_prompt_tokens tokens: drop skips and counts "
        "them, truncate cuts the end of the last user message.",
    )
    epochs: Recorded[int | None] = Field(
        default=None,
        ge=1,
        description="Passes over the training rows after which the run ends; if unset, learner.steps alone decides. "
        "With data.weights, until every source has been passed over this often.",
    )
    system_prompt: str | None = Field(
        default=None,
        description="System message for rows without one; if unset, reward.type chooses it, and empty means none.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="What happens at a malformed row: refuse stops the run before it starts, skip leaves the row out "
        "with a warning.",
    )
    on_change: Free[Literal["refuse", "accept"]] = Field(
        default="refuse",
        description="Whether a resumed run refuses or accepts training rows that have changed since its checkpoint.",
    )
    shuffle: bool = Field(
        default=True, description="Whether every epoch has a new random order, which run.seed determines."
    )
    curriculum: Recorded[CurriculumConfig] = CurriculumConfig()

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(value.keys() & SET_BY_US):
            raise ValueError(
                f"expected names of variables that only the chat template reads, got {', '.join(reserved)}, which "
                f"async-rl sets itself; leave it out (data.tools sets tools)"
            )
        return value

    @field_validator("tools")
    @classmethod
    def _are_schemas(cls, value: str) -> str:
        if value:
            parse_tools(value)
        return value

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What every chat template gets in addition to the messages, tool schemas included. ``CONTENT_KEY`` is for
        ``apply_template``.
        """
        arguments = self.chat_template_kwargs | ({"tools": parse_tools(self.tools)} if self.tools else {})
        return arguments | self.content_argument

    @property
    def content_argument(self) -> dict[str, Any]:
        """Those of ``template_arguments`` that reward models get, too."""
        return {CONTENT_KEY: "token"} if self.special_tokens_in_content == "token" else {}

    @field_validator("train", mode="before")
    @classmethod
    def _is_source_or_table(cls, value: Any) -> Any:
        """Check the whole value, because a message about one of two types would confuse."""
        is_table = (
            isinstance(value, dict) and bool(value) and all(isinstance(one, str) and one for one in value.values())
        )
        if not isinstance(value, str) and not is_table:
            raise ValueError(f"expected a file or data set in quotes, or a table of NAME = SOURCE, got {value!r}")
        return value

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if not self.weights:
            return self
        if isinstance(self.train, str):
            raise ValueError(
                f"data.weights: expected data.train to be a table of NAME = SOURCE, got {self.train!r}; name the "
                f"sources there, or leave data.weights out"
            )
        if self.weights.keys() != self.train.keys():
            raise ValueError(
                f"data.weights: expected a number for each source of data.train = {sorted(self.train)}, got numbers "
                f"for {sorted(self.weights)}; correct the names (to leave a source out, remove it from data.train)"
            )
        if wrong := [f"{name} = {weight}" for name, weight in self.weights.items() if not 1 <= weight <= _MAX_WEIGHT]:
            raise ValueError(
                f"data.weights: expected whole numbers from 1 to {_MAX_WEIGHT}, got {', '.join(wrong)}; correct them "
                f"(to leave a source out, remove it from data.train)"
            )
        return self

    @field_validator("train", "eval")
    @classmethod
    def _are_names(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        for name in () if isinstance(value, str) else value:  # of files and metrics
            if re.fullmatch(r"\w[\w.+-]*", name) is None:
                raise ValueError(
                    f"expected names of letters, digits and _ . + -, got {name!r}; rename it, because its name "
                    f"becomes part of file names and metrics"
                )
        return value


class EvalSetConfig(Section):
    """How a set of ``data.eval`` is answered: the keys of ``[eval]`` that may differ from set to set."""

    every: int = Field(
        default=50,
        ge=0,
        description="Steps between two evaluations; 0 evaluates only before the first and after the last step.",
    )
    num_samples: int = Field(
        default=1, ge=1, le=1024, description="Number of answers that an evaluation samples for each row."
    )
    temperature: float = Field(
        default=0.0, ge=0, description="Sampling temperature of evaluations; 0 is greedy decoding."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Evaluations sample only from the most likely tokens whose probabilities add up to this; 1 means "
        "all tokens.",
    )
    top_k: int = Field(
        default=0, ge=0, description="Evaluations sample only from this many most likely tokens; 0 means all tokens."
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Evaluations sample only from tokens whose probability is at least this share of the most likely "
        "token's, before top_p and top_k; 0 means all tokens.",
    )
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens of an answer in evaluations; if unset, sampling.max_new_tokens.",
    )
    max_rows: int | None = Field(
        default=None,
        ge=1,
        description="Evaluate only this many rows of each set, the first ones; if unset, all rows.",
    )


class EvalConfig(EvalSetConfig):
    """When and how the model is evaluated on the sets of ``data.eval``."""

    on_resume: ClassVar[OnResume] = OnResume.RECORDED

    sets: dict[str, EvalSetConfig] = Field(
        default={},
        description="Keys of this section that have another value for one set: a table [eval.sets.NAME], where NAME is "
        "a set of data.eval.",
    )

    @field_serializer("sets")
    def _only_what_is_set(self, sets: dict[str, EvalSetConfig]) -> dict[str, dict[str, Any]]:
        """Return, for each set, only the keys that the user has set.

        If a default were written too, it would override the key of ``[eval]`` when the file is read again.
        """
        return {name: own.model_dump(exclude_unset=True, exclude_none=True) for name, own in sets.items()}

    def of(self, name: str) -> EvalSetConfig:
        """Return the settings for the set ``name``: those of ``[eval]``, changed by those of ``[eval.sets.NAME]``."""
        shared = {key: getattr(self, key) for key in EvalSetConfig.model_fields}
        own = self.sets.get(name, EvalSetConfig()).model_dump(exclude_unset=True)
        return EvalSetConfig(**{**shared, **own})
