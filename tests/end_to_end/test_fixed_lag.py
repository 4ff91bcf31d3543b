"""A study's run over the real roles: the lag is held, with two generators, two ranks and a loss that scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.slow
def test_every_token_is_exactly_fixed_lag_versions_old(tmp_path: Path):
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        learner={"steps": 6, "fixed_lag": 2, "nproc": 2},
        queue={"max_staleness": 2},
        loss={"preset": "decoupled_ppo", "kl_coef": 0.1, "kl_placement": "loss"},
        generator={"count": 2},
        checkpoint={"every": 0},
    )
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    run_dir = tmp_path / "run"
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]
    rows = [row for row in metrics(run_dir) if "version" in row]
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for key in ("staleness/mean", "staleness/max"):
        assert [row[key] for row in rows] == [0, 1, 2, 2, 2, 2]
    check_ledger(run_dir)
