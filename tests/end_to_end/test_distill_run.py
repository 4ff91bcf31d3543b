"""Runs with a teacher under layouts of the learner's ranks and with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.extensions.quickstart import sums
from tests.end_to_end.harness import launched
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.ports import free_address

TOP_K = {"teacher": "teacher", "form": "loss", "top_k": 4, "rewards": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sequence 2": {"learner": {"nproc": 2}, "parallel": {"sequence": 2}},
    "pipeline 2": {"learner": {"nproc": 2}, "parallel": {"pipeline": 2}},
    "adapters": {"lora": {"rank": 8}, "learner": {"groups_per_step": 16}},
    "tensor 2, from the sampled token": {
        "learner": {"nproc": 2}, "parallel": {"tensor": 2}, "distill": {**TOP_K, "top_k": 0},
    },
    "advantage": {"distill": {**TOP_K, "form": "advantage", "top_k": 0}},
}  # fmt: skip


def write_weights(directory: Path, *, seed: int, scale: float) -> None:
    """Random weights of four heads in place of the model in ``directory``. Its logits grow with ``scale``."""
    config = AutoConfig.from_pretrained(directory, num_attention_heads=4, num_key_value_heads=4, head_dim=24)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.constant_(model.model.norm.weight, scale)
    model.save_pretrained(directory)


def a_config(directory: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run on samples of its own weights that learns from the teacher alone, who prefers other tokens."""
    task = write_tiny_task(directory)
    sums.write_model(directory / "teacher", seed=1)
    # Adapters leave the embedding and the last norm as they are, so they can't make logits larger.
    write_weights(Path(task["model"]), seed=0, scale=4.0 if "lora" in changes else 1.0)
    write_weights(directory / "teacher", seed=1, scale=6.0)
    raw = tiny_config(
        directory,
        task,
        reward={"type": "none"},
        scorer={"teacher": {"model": str(directory / "teacher"), "address": free_address()}},
        distill=TOP_K,
        queue={"max_staleness": 0},
        optimizer={"lr": 3e-3},
        eval={"every": 0},
    )
    for section, keys in changes.items():
        raw.setdefault(section, {}).update(keys)
    return raw


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_student_comes_nearer_to_its_teacher_under_every_layout(tmp_path: Path, layout: str):
    raw = a_config(tmp_path, **LAYOUTS[layout])
    raw["optimizer"]["lr"] = 1e-2 if layout == "adapters" else 3e-3
    raw["learner"]["steps"] = 24
    rows = launched(tmp_path, raw)
    first, last = (sum(row["distill/kl"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert 0 < last < 0.8 * first
    assert all(row["ratio/mean"] == pytest.approx(1.0, abs=1e-5) for row in rows)
    assert all(not row["tokens/masked"] for row in rows)
