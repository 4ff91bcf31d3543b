"""The learner's benchmark compares equals: every side computes the gradient of the same loss on the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learner_data import Task, write_model
from benchmarks.learner_sides import SIDES


def a_task(directory: Path) -> Task:
    return Task(
        directory=str(directory), shape="cpu", vocab_size=100, num_groups=2, length=48, sigma=1.0, max_tokens=128,
        device="cpu", dtype="float32", gradient_checkpointing=False, settings=(),
    )  # fmt: skip


def test_all_sides_with_a_policy_gradient_have_the_same_one(tmp_path: Path):
    task = a_task(tmp_path)
    write_model(task)
    norms = {name: SIDES[name](task)() for name in ("async-rl", "packed", "padded")}
    assert norms["packed"] == pytest.approx(norms["async-rl"], rel=1e-4)
    assert norms["padded"] == pytest.approx(norms["async-rl"], rel=1e-4)
    assert SIDES["limit"](task)() is None
