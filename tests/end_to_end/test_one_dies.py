"""Three generators of different settings on one learner; one dies in the middle of a transfer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.one_dies import check, kill_one_mid_transfer

GENERATORS = {
    "wide": ("generator.backend=transformers", "generator.batch_size=8", "generator.num_threads=1"),
    "narrow": (
        "generator.backend=transformers", "generator.batch_size=2", "generator.max_concurrent_groups=1",
        "generator.num_threads=1",
    ),
    "recomputing": (
        "generator.backend=transformers", "generator.batch_size=4", "generator.kv_after_update=recompute",
        "generator.num_threads=1",
    ),
}  # fmt: skip


@pytest.mark.slow
def test_a_generator_killed_in_a_transfer_keeps_neither_the_learner_nor_the_others(tmp_path: Path):
    outcome = kill_one_mid_transfer(tmp_path, GENERATORS, "narrow", start_s=120)
    check(outcome, {"wide", "recomputing"})
