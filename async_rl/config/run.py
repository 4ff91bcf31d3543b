"""The sections ``run``, ``checkpoint`` and ``log``: where a run lies and what it writes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.section import Section


class RunConfig(Section):
    """The run itself."""

    dir: str = Field(
        min_length=1,
        description="Directory for everything that the run writes; starting again with the same directory resumes it.",
    )
    name: str = Field(
        default="", description="Name of the run on the screen and in wandb; if empty, the last part of run.dir."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of the order of the data, of sampling and of new adapter weights."
    )


class CheckpointConfig(Section):
    """When the learner saves model, optimizer and queue, so that the run can resume."""

    every: int = Field(default=50, ge=0, description="Steps between two checkpoints; 0 writes one only at the end.")
    keep_last: int = Field(default=2, ge=1, description="Number of newest checkpoints that stay on disk.")


class LogConfig(Section):
    """What is logged in addition to ``metrics.jsonl``."""

    wandb: Literal["off", "online", "offline"] = Field(
        default="off", description="Whether metrics also go to Weights & Biases, over the network or into local files."
    )
    project: str = Field(default="async-rl", description="Name of the wandb project.")
    rollouts_every: int = Field(
        default=10,
        ge=0,
        description="Steps between two files of sampled rollouts in the run directory; 0 writes none.",
    )
    rollouts_groups: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=2, description="Number of groups in such a file, chosen at random from those of its step."
    )
