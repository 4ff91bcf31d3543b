"""The queue benchmark measures what it says: its load, and one short run of the product's side."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.queue.core.groups import read_summary
from async_rl.records import BYTES_PER_TOKEN, PER_TOKEN
from benchmarks.queue_depth import cost_us
from benchmarks.queue_measure import Load
from benchmarks.queue_product import GROUP_SIZE, ProductOptions, body_of, measure_product, tokens_for


@pytest.mark.parametrize("size_kib", [4, 32, 256])
def test_a_group_is_encoded_in_its_size_and_hardly_less(size_kib: int):
    body = body_of(tokens_for(size_kib * 1024))
    # One token more in each of 8 rollouts, and padding of its arrays.
    room = 8 * BYTES_PER_TOKEN + len(PER_TOKEN) * 16
    assert size_kib * 1024 - room <= len(body) <= size_kib * 1024
    facts = read_summary(body)
    assert (facts.unfit, facts.num_rollouts, facts.num_tokens) == ("", GROUP_SIZE, 8 * tokens_for(size_kib * 1024))


def test_the_product_moves_groups_with_its_journal_and_their_cost_is_measured_at_a_depth(tmp_path: Path):
    options = ProductOptions(tmp_path, has_journal=True, has_keys=True, groups_per_step=2)
    measured = measure_product(Load(4096, warmup_s=0.1, measured_s=0.2), options)
    assert measured.groups_per_s > 0
    assert set(measured.cpu_us) == {"server", "generator", "learner"}
    assert not list(tmp_path.iterdir()), "a run leaves nothing behind"
    assert cost_us(100, tmp_path, num_steps=3) > 0
