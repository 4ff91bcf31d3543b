"""A tiny random model and a sums dataset, made on the spot: the quickstart's task in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.extensions.quickstart import sums


def write_tiny_task(directory: Path, *, num_rows: int = 64, num_eval: int = 8) -> dict[str, str]:
    """Paths of ``model``, ``train`` and ``held_out``."""
    sums.write_model(directory / "model", seed=0)
    pairs = sums.split_pairs(0)
    for name, chosen in (("train", pairs["rl"][:num_rows]), ("held_out", pairs["held_out"][:num_eval])):
        rows = [{"messages": [{"role": "user", "content": f"{a}+{b}:"}], "gt_answer": str(a + b)} for a, b in chosen]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return {name: str(directory / file) for name, file in _FILES.items()}


_FILES = {"model": "model", "train": "train.jsonl", "held_out": "held_out.jsonl"}


def tiny_config(directory: Path, task: dict[str, str], **changes: dict[str, Any]) -> dict[str, Any]:
    """A run of a few small steps in ``directory / run``; ``changes`` are merged section by section.

    A random model is never right, so no group is filtered and answers cut at the limit are trained on.
    """
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": task["model"]},
        "data": {"train": task["train"], "eval": {"held_out": task["held_out"]}, "system_prompt": ""},
        "sampling": {"group_size": 2, "max_new_tokens": 12, "max_prompt_tokens": 16},
        "queue": {"max_staleness": 2, "filter_range": [], "lease_timeout_s": 10.0},
        "loss": {"mask_truncated": False},
        "learner": {"steps": 6, "groups_per_step": 4, "max_tokens": 512, "num_threads": 1},
        "optimizer": {"lr": 1e-4},
        "generator": {"batch_size": 8, "num_threads": 1},
        "weights": {"deadline_s": 20.0},
        "checkpoint": {"every": 2},
        "eval": {"every": 3},
    }
    for section, keys in changes.items():
        config.setdefault(section, {}).update(keys)
    return config
