"""The section ``distill``: teachers whose distribution the policy is pulled towards, on its own samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Recorded, Section


class DistillConfig(Section):
    """On-policy distillation from teachers, which are scorers (`scorer.NAME`). Off unless a teacher is named; see
    docs/trainings.md.
    """

    teacher: str | None = Field(
        default=None, description="The scorer, one of the tables scorer.NAME, that is the teacher of all prompts."
    )
    teachers: dict[str, str] = Field(
        default={},
        description="Teachers by data source: a table SOURCE = SCORER, with sources of data.train. They take the place "
        "of distill.teacher for prompts of these sources.",
    )
    form: Literal["advantage", "loss"] = Field(
        default="advantage",
        description="How the policy learns from its teacher: log teacher - log policy of each sampled token is added "
        "to its advantage, or KL(policy || teacher) to its loss.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="With the form loss, number of the teacher's likeliest tokens over which the KL is computed, the "
        "rest as one; 0 takes the sampled token alone.",
    )
    coef: Recorded[float] = Field(
        default=1.0, gt=0, description="Factor of the teacher's term in the advantage or the loss."
    )
    rewards: bool = Field(
        default=True,
        description="Whether the policy also learns from rewards. If false, the teacher alone counts, and rewards are "
        "only metrics.",
    )

    @property
    def is_set(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None or bool(self.teachers)

    def teacher_of(self, source: str) -> str | None:
        """Return the scorer of prompts of the data source ``source``. None if they have no teacher."""
        return self.teachers.get(source, self.teacher)

    @property
    def by_use(self) -> dict[str, str]:
        """The key of each teacher -> the name of its scorer."""
        named = {} if self.teacher is None else {"distill.teacher": self.teacher}
        return named | {f"distill.teachers.{source}": name for source, name in self.teachers.items()}
