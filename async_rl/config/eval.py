"""The section ``eval``: when and how the sets of ``data.eval`` are answered. ``config.py`` checks it with others.

``[eval]`` holds for every set; ``[eval.sets.NAME]`` says what one of them has of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pydantic import Field

from async_rl.config.section import Section


@dataclass(frozen=True, slots=True)
class EvalSet:
    """How one set is answered, all said. ``max_new_tokens`` None: as in training; ``max_rows`` None: all rows."""

    every: int
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None
    max_rows: int | None


class EvalSetConfig(Section):
    """What one set has of its own: ``eval.sets.NAME``. Keys that are left out are those of ``[eval]``."""

    every: int | None = Field(default=None, ge=0, description="steps; 0: only at the start and the end")
    num_samples: int | None = Field(default=None, ge=1, le=1024, description="answers a row")
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1)
    max_rows: int | None = Field(default=None, ge=1)


class EvalConfig(Section):
    every: int = Field(default=50, ge=0, description="steps; 0: only at the start and the end")
    num_samples: int = Field(default=1, ge=1, le=1024, description="answers a row")
    temperature: float = Field(default=0.0, ge=0, description="0: greedy decoding")
    top_p: float = Field(default=1.0, gt=0, le=1, description="as sampling.top_p, which has no say here")
    top_k: int = Field(default=0, ge=0, description="as sampling.top_k, which has no say here")
    max_new_tokens: int | None = Field(default=None, ge=1, description="none: sampling.max_new_tokens")
    max_rows: int | None = Field(default=None, ge=1, description="the first rows of each dataset; none: all")
    majority: bool | None = Field(
        default=None, description="vote over a row's answers; none: where reward.type extracts some and there are more"
    )
    sets: dict[str, EvalSetConfig] = Field(default={}, description="name of data.eval -> keys of its own")

    def of(self, name: str) -> EvalSet:
        """How the set called ``name`` is answered."""
        own = self.sets.get(name) or EvalSetConfig()
        chosen = {field.name: getattr(own, field.name) for field in fields(EvalSet)}
        return EvalSet(**{key: getattr(self, key) if value is None else value for key, value in chosen.items()})
