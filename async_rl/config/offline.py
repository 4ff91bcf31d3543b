"""The sections of the commands that train on given rows: ``sft``. Keys of the same name have the same meaning."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from async_rl.config.section import Section

STEPS = 1000
"""The number of optimizer steps if neither ``steps`` nor ``epochs`` is set."""


class OfflineConfig(Section):
    """What the sections of all these commands have."""

    data: str = Field(
        default="", description="Training rows, in any form that data.train has; the command of the section needs it."
    )
    out: str = Field(
        default="", description="Hugging Face model directory to write; the command of the section needs it."
    )
    steps: int | None = Field(
        default=None, ge=1, description=f"Number of optimizer steps; if neither steps nor epochs is set, {STEPS}."
    )
    epochs: int | None = Field(
        default=None, ge=1, description="Number of passes over the rows, in place of a number of steps."
    )
    batch_size: int = Field(default=64, ge=1, description="Number of rows in one optimizer step, over all ranks.")
    max_length: int = Field(
        default=2048, ge=2, description="Maximum number of tokens of a sequence; the end of longer ones is cut."
    )
    lr: float = Field(default=1e-5, gt=0, description="Learning rate after the warm-up.")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="cosine",
        description="How the learning rate changes from the end of the warm-up to the last step.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rate rises linearly to lr."
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="Optimizer steps between two checkpoints; 0 writes one only at the end."
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"epochs: expected no value with steps = {self.steps}, got {self.epochs}; set only one of the two"
            )
        return self

    def num_steps(self, num_rows: int) -> int:
        """Return the number of optimizer steps on ``num_rows`` rows."""
        if self.epochs is None:
            return self.steps or STEPS
        return -(-self.epochs * num_rows // self.batch_size)


class SftConfig(OfflineConfig):
    """Supervised fine-tuning with `async-rl sft`, to prepare a model before reinforcement learning."""
