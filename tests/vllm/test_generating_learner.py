"""A learner that samples with vLLM: its engine sleeps while the rank trains, and wakes with the next version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.process.fault_points import FAULT_POINTS
from tests.end_to_end.faults_harness import fault_config, fault_run, judge
from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

pytestmark = pytest.mark.vllm

NUM_STEPS = 5
WITH_VLLM: dict[str, Any] = {"generate": True, "generate_backend": "vllm"}
ALONE: dict[str, Any] = {"count": 0, "backend": "transformers"}
VLLM: dict[str, Any] = {"vllm": {"kv_cache_bytes": 64 << 20}}
"""For the section ``experimental``."""
LORA: dict[str, Any] = {"lora": {"rank": 4, "publish": "adapters"}, "optimizer": {"lr": 3e-3}}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"learner": {"nproc": 2}}, id="two ranks"),
        pytest.param(LORA, id="versions of adapters", marks=pytest.mark.long),
        pytest.param({"learner": {"updates_per_batch": 2}}, id="one rank", marks=pytest.mark.long),
    ],
)
def test_a_learner_that_samples_with_vllm_is_the_whole_system(tmp_path: Path, sections: dict[str, dict[str, Any]]):
    task = write_tiny_task(tmp_path)
    merged = {"generator": ALONE, "experimental": VLLM} | sections
    merged["learner"] = {"steps": NUM_STEPS, **WITH_VLLM} | sections.get("learner", {})
    config, run_dir = write_config(tmp_path / "config.toml", tiny_config(tmp_path, task, **merged)), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    assert steps(run_dir) == list(range(1, NUM_STEPS + 1))
    assert check_ledger(run_dir)["groups"]["trained"] == NUM_STEPS * 4
    rows = [row for row in metrics(run_dir) if "version" in row]
    for row in rows:
        assert row["learner_sampled/groups"] == 4
        assert 0 <= row["idle/learner_used"] <= 1
    # What it sampled while the weights changed between its turns is what each version says of it.
    same_version = [row["mismatch_kl/lag_0"] for row in rows if "mismatch_kl/lag_0" in row]
    assert same_version
    assert max(same_version) < 1e-8


POINTS = tuple(point for point in FAULT_POINTS if point != "generator.receiving")
"""No version of the weights is received."""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_learner_that_samples_with_vllm_and_is_killed_loses_and_repeats_no_prompt(tmp_path: Path):
    num_rows = 120
    config = fault_config(
        tmp_path, num_rows=num_rows, learner=WITH_VLLM, generator=ALONE | {"num_threads": 1}, experimental=VLLM
    )
    with fault_run(tmp_path, config, num_generators=0) as run:
        run.launch()
        run.kill_at_each(POINTS)
        run.finish()
    print(f"{judge(run.run_dir, num_rows=num_rows)}; {run.num_starts} starts")
