"""The predictions for machines with GPUs: by hand, where that is possible, and in the right order."""

from __future__ import annotations

from typing import get_args

import pytest

from async_rl.config.learner import Recomputation
from async_rl.config.parallel import Layout
from async_rl.launch.checks.prediction import Tokens, learner_parts
from async_rl.learner.cards import Machines
from benchmarks import predicted
from benchmarks.memory_table import decoder

TINY = predicted.Shape(decoder(64, 128, 2, 4, 2, 4096, tied=True), 1, "none")


def test_what_is_recomputed_costs_time_and_the_operations_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predicted, "LAUNCH_S", 0.0)
    plain = predicted.predict(TINY, max_tokens=512, length=256)
    again = predicted.predict(TINY._replace(checkpointing="full"), max_tokens=512, length=256)
    assert 0 < plain.micro_batch_s < again.micro_batch_s
    assert 0 < again.mfu < plain.mfu < 1
    assert again.mfu * again.micro_batch_s == pytest.approx(plain.mfu * plain.micro_batch_s)
    # 4,096 rows of 64 and two layers of two squares, keys and values of half, and three matrices of the MLP; 2 bytes.
    assert plain.version_bytes == 2 * (4096 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128))


def test_the_parts_of_a_micro_batch_are_all_of_it():
    plain, again = (
        predicted.predict_parts(TINY._replace(checkpointing=how), max_tokens=512, length=256)
        for how in ("none", "full")
    )
    assert plain.whole == pytest.approx(predicted.predict(TINY, max_tokens=512, length=256).micro_batch_s)
    assert plain.whole == pytest.approx(sum(plain) - plain.trunk_fused - plain.whole)
    assert min(plain) > 0
    # Only the trunk is recomputed.
    assert again.trunk_products > plain.trunk_products
    assert (again.head_products, again.head_others) == (plain.head_products, plain.head_others)


@pytest.mark.parametrize("how", get_args(Recomputation))
def test_the_doctors_sums_are_those_of_the_kernels_of_a_micro_batch(how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predicted, "LAUNCH_S", 0.0)
    shape = predicted.Shape(decoder(896, 4864, 2, 14, 2, 32768), 1, how)
    parts = predicted.predict_parts(shape, max_tokens=4096, length=1024)
    # Four sequences of 1,024 with prompts of 128: 3,584 sampled tokens, and 4 x 1024^2 / 2 pairs.
    tokens = Tokens(rows=4096, sampled=3584, attended=4 * 1024**2 / 2 / 3584, mean=896)
    config, machines = predicted._config(shape, 4096), Machines.parse("--on", "1xH100")
    sums = learner_parts(shape.model, config, Layout(), machines, tokens)
    assert sums["products"] == pytest.approx(parts.trunk_products + parts.head_products, rel=0.02)
    assert sums["attention"] == pytest.approx(parts.attention, rel=0.02)
    assert sums["other kernels"] == pytest.approx(parts.trunk_others + parts.head_others, rel=0.1)


def test_a_pause_is_a_gather_and_the_slower_of_copies_and_digests():
    size = predicted.version_layout(TINY).size_bytes
    assert predicted.pause_parts(TINY) == (0, pytest.approx(size / 40e9))  # one rank has all, and digests are slower
    assert predicted.pause_parts(TINY._replace(num_ranks=16), 2) == pytest.approx((size / 200e9, size / 80e9))
