"""A learner that samples with vLLM: its engine sleeps while the rank trains, and wakes with the next version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import check_ledger, launched
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
    rows = launched(tmp_path, tiny_config(tmp_path, task, **merged))
    assert check_ledger(tmp_path / "run")["groups"]["trained"] == NUM_STEPS * 4
    for row in rows:
        assert row["learner_sampled/groups"] == 4
        assert 0 <= row["idle/learner_used"] <= 1
    # What it sampled while the weights changed between its turns is what each version says of it.
    same_version = [row["mismatch_kl/lag_0"] for row in rows if "mismatch_kl/lag_0" in row]
    assert same_version
    assert max(same_version) < 1e-8
