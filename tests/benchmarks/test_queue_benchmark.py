"""The queue benchmark measures what it says: its load, and one short run of the product's side."""

from __future__ import annotations

from pathlib import Path

from benchmarks.queue_depth import cost_us
from benchmarks.queue_measure import Load
from benchmarks.queue_product import ProductOptions, measure_product


def test_the_product_moves_groups_with_its_journal_and_their_cost_is_measured_at_a_depth(tmp_path: Path):
    options = ProductOptions(tmp_path, has_journal=True, has_keys=True, groups_per_step=2)
    measured = measure_product(Load(4096, warmup_s=0.1, measured_s=0.2), options)
    assert measured.groups_per_s > 0
    assert set(measured.cpu_us) == {"server", "generator", "learner"}
    assert not list(tmp_path.iterdir()), "a run leaves nothing behind"
    assert cost_us(100, tmp_path, num_steps=3) > 0
