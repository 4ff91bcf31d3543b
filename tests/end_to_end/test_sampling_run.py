"""A run over the real roles that samples with top-p and top-k, at a temperature that goes down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import check_ledger, metrics, roles, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


def train(root: Path, **changes: Any) -> list[dict[str, Any]]:
    """The metrics of the four steps of a run in which nothing is stale."""
    raw = tiny_config(
        root,
        write_tiny_task(root),
        **changes,
        queue={"max_staleness": 0},
        checkpoint={"every": 0},
        eval={"every": 0},
        optimizer={"lr": 1e-2},
    )
    with roles(root / "logs") as start:
        start("launch", "launch", str(write_config(root / "config.toml", raw))).succeed()
    check_ledger(root / "run")
    return [row for row in metrics(root / "run") if "version" in row]


@pytest.mark.slow
def test_every_ratio_of_a_run_on_policy_is_1_under_top_p_and_a_falling_temperature(tmp_path: Path):
    # From 1.4 to 0.8 over 3 versions: 0.2 a version.
    found = train(
        tmp_path,
        sampling={"top_p": 0.7, "temperature": 1.4, "temperature_end": 0.8, "temperature_steps": 3},
        learner={"steps": 4, "nproc": 2},
        loss={"kl_coef": 0.1, "kl_placement": "loss"},
        generator={"count": 2},
    )
    assert [row["temperature"] for row in found] == pytest.approx([1.4, 1.2, 1.0, 0.8])
    for row in found:
        assert (row["staleness/max"], row["skip/tokens"]) == (0, 0)
        assert (row["ratio/mean"], row["ratio/max"], row["ratio/ess"]) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    # Nothing yet to tell the policy from its reference; a KL of exactly 0 is left out.
    assert found[0].get("kl/reference", 0.0) == pytest.approx(0.0, abs=1e-9)
    assert found[-1]["kl/reference"] > 0


@pytest.mark.slow
def test_a_run_over_the_fake_backend_trains_on_its_sampling_masks(tmp_path: Path):
    found = train(
        tmp_path,
        sampling={"top_p": 0.5, "top_k": 12},
        learner={"steps": 4},
        generator={"backend": "fake"},
        experimental={"fake": {"mean_tokens": 6.0, "vocab_size": 20}},
    )
    # 6 of 12 tokens are kept, and the tiny model's logits are close to equal, as the fake's are: an entropy near
    # log 6 = 1.792, where the whole vocabulary has more than 3. The mean of pi/mu over samples of mu is 1.
    assert 1.6 < found[0]["entropy"] < 1.792
    assert found[0]["ratio/mean"] == pytest.approx(1.0, abs=0.2)
