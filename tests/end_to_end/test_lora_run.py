"""A run of adapters as a user has it: generators sample with merged weights, what it leaves can be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

NUM_STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize(("publish", "transport"), [("merged", "tcp"), ("adapters", "gloo")])
def test_a_run_with_adapters_trains_and_exports(tmp_path: Path, publish: str, transport: str):
    task = write_tiny_task(tmp_path)
    raw = tiny_config(
        tmp_path,
        task,
        lora={"rank": 4, "publish": publish},
        learner={"steps": NUM_STEPS},
        # A random model earns nothing: the entropy bonus moves it.
        loss={"preset": "grpo", "kl_coef": 0.01, "entropy_coef": 0.1},
        optimizer={"lr": 3e-3},
        generator={"backend": "transformers", "kv_after_update": "recompute"},
        weights={"transport": transport},
    )
    config, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
        start("adapter", "export", str(run_dir), str(tmp_path / "adapter"), "--adapter").succeed()
        start("eval", "eval", str(run_dir), "--dataset", task["held_out"], "--max-new-tokens", "8").succeed()
    assert steps(run_dir) == list(range(1, NUM_STEPS + 1))
    check_ledger(run_dir)
    rows = [row for row in metrics(run_dir) if "version" in row]
    # What a generator's merged weights say of a token is what the learner's adapters say of it.
    same_version = [row["mismatch_kl/lag_0"] for row in rows if "mismatch_kl/lag_0" in row]
    assert same_version
    assert max(same_version) < 1e-8
    assert rows[0]["kl/reference"] < 1e-9  # adapters begin as no change
    assert rows[-1]["kl/reference"] > 1e-6
    before = load_file(Path(task["model"]) / "model.safetensors")
    after = load_file(run_dir / "export" / "model.safetensors")
    moved = {
        name.rpartition(".")[0].rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])
    }
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    # Each tensor begins at a multiple of 64 bytes.
    sent = sum(-(-t.nbytes // 64) * 64 for t in (before if publish == "merged" else adapters).values())
    assert rows[-1]["weights/bytes"] == pytest.approx(sent, abs=64)
    assert sum(t.numel() for t in adapters.values()) < sum(t.numel() for t in before.values()) / 4
