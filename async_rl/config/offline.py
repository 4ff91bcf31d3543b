"""The sections of the commands that train on given rows: ``sft``, ``rm`` and ``dpo``. Keys of the same name mean the
same.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from async_rl.config.section import OnResume, Section

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

    eval: dict[str, str] = Field(
        default={}, description="Datasets of rows that are evaluated but not trained on, by name."
    )
    eval_every: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps between two evaluations of eval; 0 evaluates only after the last step.",
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

    on_resume: ClassVar[OnResume] = OnResume.FREE

    turns: Literal["all", "last"] = Field(
        default="all", description="Which assistant messages of a row are trained: all of them, or only the last."
    )


PreferenceLoss = Literal["sigmoid", "ipo", "kto", "simpo", "orpo"]
_ONLY_OF: dict[str, PreferenceLoss] = {
    "label_smoothing": "sigmoid",
    "gamma": "simpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
}
"""Key -> the only loss that reads it."""


class DpoConfig(OfflineConfig):
    """Training on preferences with `async-rl dpo`."""

    on_resume: ClassVar[OnResume] = OnResume.FREE

    lr: float = Field(default=1e-6, gt=0, description="Learning rate after the warm-up.")
    loss: PreferenceLoss = Field(
        default="sigmoid",
        description="The loss: sigmoid is DPO. kto learns from answers with a label, the others from pairs. simpo and "
        "orpo need no reference model.",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="How closely the policy stays at the reference model: the factor of the log ratios, tau in IPO, "
        "in simpo of the mean log-probabilities (its paper has 2.0), in orpo of the odds ratio (lambda).",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Assumed share of pairs with the wrong label; only for sigmoid."
    )
    gamma: float | None = Field(
        default=None, ge=0, description="The margin that simpo demands of beta times the difference; if unset, 0.5."
    )
    desirable_weight: float = Field(default=1.0, gt=0, description="Weight of good answers; only for kto.")
    undesirable_weight: float = Field(default=1.0, gt=0, description="Weight of bad answers; only for kto.")

    @model_validator(mode="after")
    def _keys_fit_the_loss(self) -> Self:
        for key, loss in _ONLY_OF.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if self.loss != loss and value != default:
                raise ValueError(
                    f'{key}: expected no value with loss = "{self.loss}", got {value}; only {loss} reads it, so leave '
                    f"it out"
                )
        return self

    @property
    def target_margin(self) -> float:
        """The value of ``gamma``, with its default."""
        return 0.5 if self.gamma is None else self.gamma

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference model."""
        return self.loss not in ("simpo", "orpo")


class RmConfig(OfflineConfig):
    """Training of a reward model on pairs of answers with `async-rl rm`."""

    on_resume: ClassVar[OnResume] = OnResume.FREE

    max_length: int = Field(
        default=2048, ge=2, description="Maximum number of tokens of a sequence; a pair with a longer one is left out."
    )
