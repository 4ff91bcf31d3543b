"""The section ``reward.judge``: the language model that judges answers for ``reward.type = "judge"``."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from async_rl.config.section import Free, Recorded, Section

PLACEHOLDER = re.compile(r"\{(prompt|answer|transcript|gt_answer|extra_info(?:\.\w+)*)\}")
"""What is replaced in a rubric."""

_RUBRIC = (
    "Judge the answer to the question by how right, complete and clear it is.\n\n"
    "# Question\n{prompt}\n\n# Answer\n{answer}\n"
)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    is_plain = text.isascii() and text.isprintable() and not set(text) & set(" @?#")
    return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


class JudgeConfig(Section):
    """A language model that judges answers, behind OpenAI's chat completions, for `reward.type = "judge"`."""

    endpoint: Free[str | None] = Field(
        default=None,
        description="Base address of the service, as in https://host/v1; requests go to /chat/completions below it.",
    )
    model: str = Field(default="", description="Name of the model, as the service knows it.")
    api_key_env: Free[str | None] = Field(
        default=None,
        description="Name of the environment variable that has the service's key on every machine with a generator; "
        "if unset, none is sent.",
    )
    rubric: str = Field(
        default=_RUBRIC,
        description="What the judge is asked. {answer}, {prompt}, {transcript}, {gt_answer} and {extra_info.KEY} are "
        "replaced; {answer} or {transcript} must be there. How to write the score is added at the end.",
    )
    min_score: float = Field(default=0.0, description="Worst score of a verdict, which earns nothing.")
    max_score: float = Field(default=10.0, description="Best score of a verdict, which earns reward.scale points.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature of the judge.")
    max_tokens: int = Field(default=1024, ge=1, description="Maximum number of tokens of a verdict.")
    max_attempts: Recorded[int] = Field(
        default=3,
        ge=1,
        description="How often the judge is asked for a verdict that can be read, until the group fails.",
    )
    timeout_s: Free[float] = Field(
        default=60.0, gt=0, description="Maximum wall-clock seconds of one request; then it is sent again."
    )
    max_concurrent: Free[int] = Field(
        default=16, ge=1, description="Maximum number of requests of a generator at a time."
    )
    cache: Free[str | None] = Field(
        default=None,
        description="SQLite file that keeps verdicts, so that the same answer is judged once; if unset, each "
        "generator keeps them in memory.",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not _is_address(value):
            # It is not quoted, because it may have a password or a key.
            raise ValueError(
                "expected an address like https://host/v1, without a user, a query or a blank, got another form; "
                "correct it (a key belongs into the variable of reward.judge.api_key_env)"
            )
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.max_score <= self.min_score:
            raise ValueError(
                f"max_score: expected more than min_score = {self.min_score:g}, got {self.max_score:g}; correct one"
            )
        if "{answer}" not in self.rubric and "{transcript}" not in self.rubric:
            raise ValueError(
                "rubric: expected {answer} or {transcript}, where the judge reads the answer, got none; add it"
            )
        return self
