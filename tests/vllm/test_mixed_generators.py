"""Two vLLM generators and a transformers one, each with settings of its own, on one learner; a vLLM one is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.one_dies import check, kill_one_mid_transfer

VLLM = ("generator.backend=vllm", "generator.num_threads=1")
GENERATORS = {
    "first": (*VLLM, "generator.batch_size=16", "experimental.vllm.kv_cache_bytes=67108864"),
    "second": (*VLLM, "generator.batch_size=8", "generator.kv_after_update=recompute"),
    "third": ("generator.backend=transformers", "generator.batch_size=4", "generator.num_threads=1"),
}


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_vllm_generator_killed_in_a_transfer_keeps_neither_the_learner_nor_the_others(tmp_path: Path):
    outcome = kill_one_mid_transfer(tmp_path, GENERATORS, "second", start_s=400)
    check(outcome, {"first", "third"})
