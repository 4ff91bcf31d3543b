"""The section ``critic``: what estimates values for ``loss.advantage = "gae"``, trained beside the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Recorded, Section


class CriticConfig(Section):
    """The critic of loss.advantage = "gae", which estimates the reward to come at every token."""

    path: str | None = Field(
        default=None,
        description="Model that the critic begins with: a causal language model with the policy's tokenizer, or a "
        "sequence classification model with one label, such as a reward model; if unset, model.path.",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount of rewards for each sampled token.")
    lam: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Lambda of the generalised advantage estimate: 1 trusts rewards only (unbiased), 0 the next "
        "value only (least variance).",
    )
    importance_cap: float = Field(
        default=0.0,
        ge=0,
        description="Above 0, advantages and value targets are corrected for staleness with weights policy / "
        "behavior policy, cut at this number (V-trace, usually 1), which costs a forward pass.",
    )
    whiten: bool = Field(
        default=True,
        description="Whether advantages are normalised over all trained tokens of the step; value targets never are.",
    )
    value_clip: float = Field(
        default=0.5,
        ge=0,
        description="Distance, in reward units, that a value may move from what it was before the batch until its "
        "gradient is cut off; 0 sets no limit.",
    )
    freeze_steps: int = Field(
        default=0,
        ge=0,
        description="Number of first steps in which only the critic is trained.",
    )
    lr: Recorded[float] = Field(
        default=5e-6,
        gt=0,
        description="Highest learning rate of the critic. See optimizer.lr.",
    )
    schedule: Recorded[Literal["constant", "cosine", "linear"]] = Field(
        default="constant", description="How the critic's learning rate changes from the end of the warm-up on."
    )
    min_lr_ratio: Recorded[float] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Learning rate at the last step with the schedules cosine and linear, as a factor of critic.lr.",
    )
    warmup_steps: Recorded[int] = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rate rises linearly to critic.lr."
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Norm to which the critic's gradients of a larger norm are scaled down."
    )
