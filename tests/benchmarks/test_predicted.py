"""The predictions for machines with GPUs: by hand, where that is possible, and in the right order."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from benchmarks import predicted

TINY = predicted.Shape(64, 128, 2, 4, 2, 4096, True, 1, "none")


def test_what_is_recomputed_costs_time_and_the_operations_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predicted, "LAUNCH_S", 0.0)
    plain = predicted.predict(TINY, max_tokens=256, length=64)
    again = predicted.predict(TINY._replace(checkpointing="full"), max_tokens=256, length=64)
    assert 0 < plain.micro_batch_s < again.micro_batch_s
    assert 0 < again.mfu < plain.mfu < 1
    assert again.mfu * again.micro_batch_s == pytest.approx(plain.mfu * plain.micro_batch_s)
    assert replace(plain, micro_batch_s=0, mfu=0, head_share=0, peak_bytes=0) == replace(
        again, micro_batch_s=0, mfu=0, head_share=0, peak_bytes=0
    )
    # 4,096 rows of 64 and two layers of two squares, keys and values of half, and three matrices of the MLP; 2 bytes.
    assert plain.version_bytes == 2 * (4096 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128))


def test_a_larger_vocabulary_is_the_heads_work():
    small, large = (predicted.predict(TINY._replace(vocab=vocab), max_tokens=256, length=64) for vocab in (512, 65536))
    assert small.head_share < large.head_share < 1


def test_an_unknown_shape_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["predicted", "3B"])
    with pytest.raises(SystemExit):
        predicted.main()
    assert "expected shapes of 0.5B, 1.5B, 7B, 32B, got 3B" in capsys.readouterr().err
