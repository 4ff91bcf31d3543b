"""A run whose learner is a pipeline of two stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.slow
def test_a_run_in_two_stages_publishes_evaluates_and_exports(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    raw = tiny_config(
        tmp_path,
        task,
        learner={"steps": 2, "nproc": 2, "max_tokens": 128},
        parallel={"pipeline": 2},
        # A random model earns nothing: the entropy bonus moves it.
        loss={"preset": "grpo", "kl_coef": 0.01, "entropy_coef": 0.1},
        optimizer={"lr": 3e-3},
        generator={"kv_after_update": "recompute"},
        eval={"every": 2},
    )
    config, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    assert steps(run_dir) == [1, 2]
    check_ledger(run_dir)
    rows = [row for row in metrics(run_dir) if "version" in row]
    # What generators say of a token, with the published weights, is what the stages say of it.
    same_version = [row["mismatch_kl/lag_0"] for row in rows if "mismatch_kl/lag_0" in row]
    assert same_version
    assert max(same_version) < 1e-8
    assert rows[0]["kl/reference"] < 1e-9  # the reference is divided, too
    assert rows[-1]["kl/reference"] > 1e-6
    assert (run_dir / "eval" / "held_out-step-000002.jsonl").exists()
    before = load_file(Path(task["model"]) / "model.safetensors")
    after = load_file(run_dir / "export" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(not torch.equal(before[name], tensor) for name, tensor in after.items())
