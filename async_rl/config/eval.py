"""The section ``eval``: when and how the sets of ``data.eval`` are answered.

``[eval]`` holds for every set; ``[eval.sets.NAME]`` overrides it for one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pydantic import Field

from async_rl.config.section import Section


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
