"""A run over the real roles that samples with top-p, at a temperature that goes down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import check_ledger, metrics, roles, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.slow
def test_every_ratio_of_a_run_on_policy_is_1_under_top_p_and_a_falling_temperature(tmp_path: Path):
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        # From 1.4 to 0.8 over 3 versions: 0.2 a version.
        sampling={"top_p": 0.7, "temperature": 1.4, "temperature_end": 0.8, "temperature_steps": 3},
        queue={"max_staleness": 0},
        learner={"steps": 4, "nproc": 2},
        loss={"kl_coef": 0.1, "kl_placement": "loss"},
        generator={"count": 2},
        checkpoint={"every": 0},
        eval={"every": 0},
        optimizer={"lr": 1e-2},
    )
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(write_config(tmp_path / "config.toml", raw))).succeed()
    check_ledger(tmp_path / "run")
    found = [row for row in metrics(tmp_path / "run") if "version" in row]
    assert [row["temperature"] for row in found] == pytest.approx([1.4, 1.2, 1.0, 0.8])
    for row in found:
        assert (row["staleness/max"], row["skip/tokens"]) == (0, 0)
        assert (row["ratio/mean"], row["ratio/max"], row["ratio/ess"]) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    # Nothing yet to tell the policy from its reference; a KL of exactly 0 is left out.
    assert found[0].get("kl/reference", 0.0) == pytest.approx(0.0, abs=1e-9)
    assert found[-1]["kl/reference"] > 0
