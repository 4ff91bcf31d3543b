"""The queue benchmark measures what it says: its load, its meter, and one short run of the product's side."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from async_rl.queue.core.groups import read_summary
from async_rl.records import BYTES_PER_TOKEN, PER_TOKEN
from benchmarks.queue_depth import cost_us
from benchmarks.queue_measure import Load, Meter, Pacer
from benchmarks.queue_product import GROUP_SIZE, ProductOptions, body_of, measure_product, tokens_for


@pytest.mark.parametrize("size_kib", [4, 32, 256])
def test_a_group_is_encoded_in_its_size_and_hardly_less(size_kib: int):
    body = body_of(tokens_for(size_kib * 1024))
    # One token more in each of 8 rollouts, and padding of its arrays.
    room = 8 * BYTES_PER_TOKEN + len(PER_TOKEN) * 16
    assert size_kib * 1024 - room <= len(body) <= size_kib * 1024
    facts = read_summary(body)
    assert (facts.unfit, facts.num_rollouts, facts.num_tokens) == ("", GROUP_SIZE, 8 * tokens_for(size_kib * 1024))


def test_the_meter_leaves_the_warm_up_out():
    meter = Meter(Load(1, rate=1.0, warmup_s=0.0, measured_s=0.0), {"server": [os.getpid()]})
    assert meter.arrive([0.0, 0.0, 0.0]) is None
    measured = meter.arrive([time.monotonic() - 1.0])
    assert measured is not None
    assert len(measured.latencies_ms) == 1
    assert 1000 <= measured.latency_ms(50) < 2000


def test_a_paced_group_that_is_late_is_not_made_up_for_by_a_burst():
    pacer = Pacer(10.0)
    pacer._due_at -= 100.0
    num_at_once = 0
    while not pacer.left_s():
        pacer.step()
        num_at_once += 1
    # 1,000 are late; the first brings it to one period (0.1 s) behind, the second to now, the third is ahead.
    assert num_at_once <= 3


def test_the_product_moves_groups_with_its_journal(tmp_path: Path):
    options = ProductOptions(tmp_path, has_journal=True, has_keys=True, groups_per_step=2)
    measured = measure_product(Load(4096, warmup_s=0.1, measured_s=0.2), options)
    assert measured.groups_per_s > 0
    assert set(measured.cpu_us) == {"server", "generator", "learner"}
    assert not list(tmp_path.iterdir()), "a run leaves nothing behind"


def test_the_cost_of_a_group_is_measured_at_a_depth(tmp_path: Path):
    assert cost_us(100, tmp_path, num_steps=3) > 0
