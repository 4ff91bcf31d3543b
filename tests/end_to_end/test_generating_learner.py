"""A learner that samples while it waits: alone, beside a generator, in layouts, and killed at every place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.faults_harness import fault_config, fault_run, judge
from tests.end_to_end.harness import check_ledger, launched, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.fault_points import FAULT_POINTS

NUM_STEPS = 5
ALONE: dict[str, Any] = {"count": 0, "backend": "transformers", "kv_after_update": "recompute"}
LORA: dict[str, Any] = {"lora": {"rank": 4}, "optimizer": {"lr": 3e-3}, "loss": {"entropy_coef": 0.1}}


def _check(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's steps, after every figure that any such run must have."""
    assert steps(run_dir) == list(range(1, NUM_STEPS + 1))
    assert check_ledger(run_dir)["groups"]["trained"] == NUM_STEPS * 4
    rows = metrics(run_dir)
    assert [row["step"] for row in rows if "eval/held_out/accuracy" in row] == [0, 3, NUM_STEPS]
    trained = [row for row in rows if "version" in row]
    # What it sampled with weights that change in place is what these weights say of it.
    same_version = [row["mismatch_kl/lag_0"] for row in trained if "mismatch_kl/lag_0" in row]
    assert same_version
    assert max(same_version) < 1e-8
    return trained


@pytest.mark.slow
def test_a_learner_alone_is_the_whole_system(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    raw = tiny_config(tmp_path, task, generator=ALONE, learner={"steps": NUM_STEPS, "generate": True})
    config, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        learner = start("learner", "learner", str(config))
        learner.succeed()
        assert "the learner samples while it waits, as generator learner-0-" in learner.log
    for row in _check(run_dir):
        assert (row["learner_sampled/groups"], row["generators"], row["weights/members"]) == (4, 1, 0)
        assert row["learner_sampled/tokens"] > 0
        assert 0 <= row["idle/learner_used"] <= 1
    assert (run_dir / "export" / "model.safetensors").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"learner": {"nproc": 2}, "parallel": {"sequence": 2}}, id="two ranks that share sequences"),
        pytest.param({"learner": {"nproc": 2}, **LORA}, id="two ranks with adapters"),
        pytest.param({**LORA, "lora": {"rank": 4, "publish": "adapters"}}, id="versions of adapters"),
        pytest.param({"generator": {"count": 1}, "learner": {"generate_groups": 1}}, id="beside a generator"),
    ],
)
def test_ranks_sample_in_every_layout_that_is_allowed(tmp_path: Path, sections: dict[str, dict[str, Any]]):
    task = write_tiny_task(tmp_path)
    merged = {name: dict(keys) for name, keys in sections.items()}
    merged["generator"] = ALONE | merged.get("generator", {})
    merged["learner"] = {"steps": NUM_STEPS, "generate": True} | merged.get("learner", {})
    launched(tmp_path, tiny_config(tmp_path, task, **merged))
    rows = _check(tmp_path / "run")
    num_ranks, num_generators = merged["learner"].get("nproc", 1), merged["generator"]["count"]
    assert rows[-1]["generators"] == num_ranks + num_generators
    sampled = [row["learner_sampled/groups"] for row in rows]
    if num_generators:
        assert sum(sampled) <= 1 + NUM_STEPS, "one in each wait: before the first step, and for each step"
    else:
        assert sampled == [4] * NUM_STEPS


POINTS = tuple(point for point in FAULT_POINTS if point != "generator.receiving")
"""No version of the weights is received."""


@pytest.mark.parametrize(
    ("points", "num_rows"),
    [
        pytest.param(("generator.sampled",), 22, marks=pytest.mark.slow, id="once"),
        pytest.param(POINTS, 104, marks=pytest.mark.long, id="at each place"),
    ],
)
def test_a_learner_that_samples_and_is_killed_loses_and_repeats_no_prompt(
    tmp_path: Path, points: tuple[str, ...], num_rows: int
):
    poison = (7,)
    config = fault_config(
        tmp_path, num_rows=num_rows, poison=poison, learner={"generate": True}, generator={"count": 0}
    )
    with fault_run(tmp_path, config, num_generators=0) as run:
        run.begin()
        run.await_step(3)  # a checkpoint is there
        for point in points:
            run.kill_at(point)
            print(f"step {run.last_step()}: killed it at {point}")
            run.await_step(run.last_step() + 1)
        assert not run.is_finished
        run.finish()
    print(f"{judge(run.run_dir, num_rows=num_rows, poison=poison)}; {run.num_starts} starts")
