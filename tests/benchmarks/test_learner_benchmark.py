"""The learner's benchmark compares equals: every side computes the gradient of the same loss on the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learner import Result, ratio
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


def test_a_ratio_is_the_median_of_the_rounds_and_absent_if_a_side_did_not_run():
    # 6 / 2, 4 / 2 and 9 / 3: 3, 2 and 3 times as fast.
    results = {"a": Result([2.0, 2.0, 3.0]), "b": Result([6.0, 4.0, 9.0]), "c": Result(failed="not run")}
    assert ratio(results, "a", "b") == 3.0
    assert ratio(results, "a", "c") is None
