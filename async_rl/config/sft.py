"""The section ``sft``: the supervised warm start that ``async-rl sft`` runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from async_rl.config.section import Section


class SftConfig(Section):
    """Supervised warm start: ``async-rl sft``."""

    data: str = Field(default="", description="JSONL rows: prompt and response, or messages")
    out: str = Field(default="", description="Hugging Face directory to write")
    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=64, ge=1, description="rows an optimizer step")
    max_length: int = Field(default=2048, ge=2, description="tokens; longer rows are cut on the right")
    lr: float = Field(default=1e-5, gt=0)
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    aggregation: Literal["token", "sequence"] = "token"
    checkpoint_every: int = Field(default=0, ge=0, description="steps; 0: only at the end")
