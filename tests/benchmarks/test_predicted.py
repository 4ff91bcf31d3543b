"""The predictions for machines with GPUs: by hand, where that is possible, and in the right order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import predicted

TINY = predicted.Shape(64, 128, 2, 4, 2, 4096, True, 1, "none")


def test_what_is_recomputed_costs_time_and_the_operations_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predicted, "LAUNCH_S", 0.0)
    plain = predicted.predict(TINY, max_tokens=512, length=256)
    again = predicted.predict(TINY._replace(checkpointing="full"), max_tokens=512, length=256)
    assert 0 < plain.micro_batch_s < again.micro_batch_s
    assert 0 < again.mfu < plain.mfu < 1
    assert again.mfu * again.micro_batch_s == pytest.approx(plain.mfu * plain.micro_batch_s)
    assert replace(plain, micro_batch_s=0, mfu=0, head_share=0, peak_bytes=0) == replace(
        again, micro_batch_s=0, mfu=0, head_share=0, peak_bytes=0
    )
    # 4,096 rows of 64 and two layers of two squares, keys and values of half, and three matrices of the MLP; 2 bytes.
    assert plain.version_bytes == 2 * (4096 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128))


def test_a_kernel_costs_what_it_reads_and_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predicted, "LAUNCH_S", 0.0)

    def moved_bytes(compute: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        with FakeTensorMode():
            left, right = torch.empty(100, 10), torch.empty(100, 10)
            with predicted.Meter([]) as meter:
                compute(left, right)
        return meter.seconds["trunk"] * predicted.BANDWIDTH

    # 4,000 bytes each.
    assert moved_bytes(lambda left, right: left * right) == pytest.approx(12000)
    assert moved_bytes(lambda left, right: left.add_(right)) == pytest.approx(12000)
    assert moved_bytes(lambda left, right: torch.mul(left, right, out=torch.empty(100, 10))) == pytest.approx(12000)
    assert moved_bytes(lambda left, right: left.copy_(right)) == pytest.approx(8000)
    # 100 elements are written, as many indices of 8 bytes are read.
    assert moved_bytes(lambda left, _: left.scatter_(1, torch.empty(100, 1, dtype=torch.int64), 1.0)) == pytest.approx(
        100 * (8 + 4)
    )
    assert moved_bytes(
        lambda left, right: left.scatter_(1, torch.empty(100, 1, dtype=torch.int64), right[:, :1])
    ) == pytest.approx(100 * (8 + 4 + 4))


def test_a_larger_vocabulary_is_the_heads_work():
    small, large = (predicted.predict(TINY._replace(vocab=vocab), max_tokens=512, length=256) for vocab in (512, 65536))
    assert small.head_share < large.head_share < 1


def test_the_parts_of_a_micro_batch_are_all_of_it():
    plain, again = (
        predicted.predict_parts(TINY._replace(checkpointing=how), max_tokens=512, length=256)
        for how in ("none", "full")
    )
    assert plain.whole == pytest.approx(predicted.predict(TINY, max_tokens=512, length=256).micro_batch_s)
    assert plain.whole == pytest.approx(sum(plain) - plain.trunk_fused - plain.whole)
    assert min(plain) > 0
    # Only the trunk is recomputed.
    assert again.trunk_others > plain.trunk_others
    assert again.trunk_products > plain.trunk_products
    assert (again.head_products, again.head_others) == (plain.head_products, plain.head_others)


def test_fused_kernels_read_and_write_what_products_leave_them():
    # Width 64, queries 64, keys 32, MLP 128. Forward 8 * 64 + 2 * 96 + 3 * 128 = 1,088; backward 11 * 64 + 2 * 96 +
    # 5 * 128 + 128 = 1,664. Of two layers and 256 tokens, 2 bytes each.
    assert predicted.fused_s(TINY, 256) == pytest.approx(2 * 2752 * 2 * 256 / predicted.BANDWIDTH)


def test_the_table_of_parts_has_a_row_for_each_way_to_recompute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(predicted, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(sys, "argv", ["predicted", "--parts"])
    predicted.main()
    header, _, *rows = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert [row[1] for row in rows] == ["none", "selective", "full"]
    assert {len(row) for row in (header, *rows)} == {9}


def test_a_pause_is_a_gather_and_the_slower_of_copies_and_digests():
    size = predicted.version_layout(TINY).size_bytes
    assert predicted.pause_parts(TINY) == (0, pytest.approx(size / 40e9))  # one rank has all, and digests are slower
    assert predicted.pause_parts(TINY._replace(num_ranks=16), 2) == pytest.approx((size / 200e9, size / 80e9))


def test_the_table_of_versions_compares_pauses_with_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(predicted, "LAUNCH_S", 0.01)  # so that a step takes seconds
    monkeypatch.setattr(predicted, "SHAPES", {"tiny": TINY._replace(num_ranks=16)})
    monkeypatch.setattr(sys, "argv", ["predicted", "--versions"])
    predicted.main()
    header, _, row = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    assert len(row) == len(header) == 11
    found = dict(zip(header, row, strict=True))
    assert found["hosts"] == "2"
    assert float(found["step"]) == pytest.approx(predicted.predict(TINY).micro_batch_s * 64 / 16, abs=0.05)


def test_an_unknown_shape_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["predicted", "3B"])
    with pytest.raises(SystemExit):
        predicted.main()
    assert "expected shapes of 0.5B, 1.5B, 7B, 32B, 70B, got 3B" in capsys.readouterr().err
