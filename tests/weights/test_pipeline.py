"""A version's chunks follow each other without a pause, in simulated time (``benchmarks.link_model``)."""

from __future__ import annotations

import pytest

from async_rl.weights.collective.receiver import NUM_DIGEST_THREADS
from benchmarks.link_model import HASH, PCIE, simulated_s
from benchmarks.predicted import SHAPES, version_layout


@pytest.mark.parametrize("link", [10e9, 25e9, 50e9])
def test_a_version_of_32b_takes_at_most_a_quarter_more_than_its_slowest_stage(link: float):
    layout = version_layout(SHAPES["32B"])
    slowest_s = layout.size_bytes / min(link, PCIE, NUM_DIGEST_THREADS * HASH)
    assert slowest_s < simulated_s(layout.bucket_sizes, link) < 1.25 * slowest_s


def test_one_chunk_passes_through_every_stage():
    # 1 ms to the device, 2 ms over the link, 1 ms to the host, 5 ms for its digest; and some looks at the library.
    took_s = simulated_s([50_000_000], 25e9)
    assert 0.009 <= took_s < 0.012
