"""The section ``sft``: the supervised warm start that ``async-rl sft`` runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Section


class SftConfig(Section):
    """Supervised fine-tuning with ``async-rl sft``, for a warm start."""

    data: str = Field(
        default="", description="JSONL file with rows of prompt and response, or of messages; `async-rl sft` needs it."
    )
    out: str = Field(default="", description="Hugging Face model directory to write; `async-rl sft` needs it.")
    steps: int = Field(default=1000, ge=1, description="Number of optimizer steps.")
    batch_size: int = Field(default=64, ge=1, description="Number of rows in one optimizer step, over all ranks.")
    max_length: int = Field(
        default=2048, ge=2, description="Maximum number of tokens of a row; the end of longer ones is cut."
    )
    lr: float = Field(default=1e-5, gt=0, description="Learning rate after the warm-up.")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="cosine", description="How the learning rate changes from the end of the warm-up to the last step."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rate rises linearly from 0 to lr."
    )
    aggregation: Literal["token", "sequence"] = Field(
        default="token",
        description="Whether the loss is a mean over tokens, or over rows of each row's mean over tokens.",
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="Optimizer steps between two checkpoints; 0 writes one only at the end."
    )
