"""Runs with a teacher under layouts of the learner's ranks, with adapters, by source, and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import sums

from tests.end_to_end.harness import check_ledger, metrics, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.scoring.scripted import free_address

TOP_K = {"teacher": "teacher", "form": "loss", "top_k": 4, "rewards": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two ranks": {"learner": {"nproc": 2}},
    "sequence 2": {"learner": {"nproc": 2}, "parallel": {"sequence": 2}},
    "pipeline 2": {"learner": {"nproc": 2}, "parallel": {"pipeline": 2}},
    "adapters": {"lora": {"rank": 4}},
    "tensor 2, from the sampled token": {
        "learner": {"nproc": 2}, "parallel": {"tensor": 2}, "distill": {**TOP_K, "top_k": 0},
    },
    "advantage": {"distill": {**TOP_K, "form": "advantage", "top_k": 0}},
}  # fmt: skip


def a_config(directory: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run on samples of its own weights that learns from the teacher alone, whose weights are others."""
    task = write_tiny_task(directory)
    sums.write_model(directory / "teacher", seed=1)
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


def train(directory: Path, raw: dict[str, Any], num_steps: int) -> list[dict[str, Any]]:
    raw["learner"]["steps"] = num_steps
    with roles(directory / "logs") as start:
        start("launch", "launch", str(write_config(directory / "config.toml", raw))).succeed()
    assert steps(directory / "run") == list(range(1, num_steps + 1))
    check_ledger(directory / "run")
    return [row for row in metrics(directory / "run") if "version" in row]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_student_comes_nearer_to_its_teacher_under_every_layout(tmp_path: Path, layout: str):
    raw = a_config(tmp_path, **LAYOUTS[layout])
    raw["optimizer"]["lr"] = 1e-2 if layout == "adapters" else 3e-3
    rows = train(tmp_path, raw, 12)
    # Both are random models, nearly uniform: what there is to learn is little, but it is learned.
    first, last = (sum(row["distill/kl"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert 0 < last < 0.8 * first
    assert all(row["ratio/mean"] == pytest.approx(1.0, abs=1e-5) for row in rows)
    assert all(not row["tokens/masked"] for row in rows)


@pytest.mark.long
def test_a_run_with_a_teacher_is_resumed_after_its_death(tmp_path: Path):
    raw = a_config(tmp_path, checkpoint={"every": 2})
    raw["learner"]["steps"] = 8
    path, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(path))
        wait_until("a checkpoint", (run_dir / "checkpoints" / "latest").exists, deadline_s=150)
        launch.kill(signal.SIGKILL)
        launch.wait()
        start("again", "launch", str(path)).succeed()
    assert steps(run_dir) == list(range(1, 9))
    assert all(row["distill/kl"] > 0 for row in metrics(run_dir) if "version" in row)
    check_ledger(run_dir)


@pytest.mark.long
def test_each_source_has_its_own_teacher(tmp_path: Path):
    raw = a_config(tmp_path)
    sums.write_model(tmp_path / "other", seed=2)
    raw["data"]["train"] = {"a": raw["data"]["train"], "b": raw["data"]["train"]}
    raw["scorer"]["other"] = {"model": str(tmp_path / "other"), "address": free_address()}
    raw["distill"] = {**TOP_K, "teachers": {"b": "other"}}
    rows = train(tmp_path, raw, 2)
    assert {key for row in rows for key in row if key.endswith("distill_kl")} == {
        "source/a/distill_kl",
        "source/b/distill_kl",
    }
