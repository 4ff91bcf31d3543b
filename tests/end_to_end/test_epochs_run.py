"""A run with two epochs per batch at the lowest bound, and with everything that scores the policy before an update."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.slow
def test_two_epochs_per_batch_at_the_lowest_bound_with_every_mask_on_two_ranks(tmp_path: Path):
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        learner={"steps": 4, "epochs_per_batch": 2, "nproc": 2},
        queue={"max_staleness": 1},
        loss={
            "preset": "m2po", "entropy_quantile": 0.5, "kl_coef": 0.01, "kl_placement": "reward", "kl_policy": "trained"
        },
        checkpoint={"every": 2},
    )  # fmt: skip
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    run_dir = tmp_path / "run"
    assert steps(run_dir) == [1, 2, 3, 4]
    rows = [row for row in metrics(run_dir) if "version" in row]
    assert [row["version"] for row in rows] == [2, 4, 6, 8]
    # Every batch is sampled with the version before its first epoch: ages 0 and 1.
    assert {(row["staleness/mean"], row["staleness/max"]) for row in rows} == {(0.5, 1)}
    assert all(0.3 < row["rule/entropy_quantile"] <= 0.5 for row in rows)
    assert all(0 <= row["rule/m2"] < 0.5 for row in rows)
    # The first policy is the reference, by the same engine: its KL is exactly 0, and then it grows.
    assert rows[0]["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["kl/reference"] != 0
    check_ledger(run_dir)
