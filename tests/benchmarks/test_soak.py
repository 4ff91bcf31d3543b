"""The figures behind ``benchmarks/soak.py``."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from benchmarks.soak import Look, StepCount, look_at_files, look_at_process, slope, table


def test_a_slope_is_per_thousand_steps_and_leaves_the_start_out():
    # The first of five looks is the start, with 900 kB more. Then 2 kB for each 100 steps: 20 kB for 1,000.
    looks = [Look("queue 7", 100 * at, {"kB": 100.0 + 2 * at + 900 * (at == 0)}) for at in range(5)]
    assert slope(looks, "kB") == pytest.approx(20.0)
    assert math.isnan(slope(looks[:2], "kB"))
    assert table(looks)[1].split() == ["queue", "7", "kB", "1,000", "108", "1,000", "20.00"]


def test_this_process_and_a_directory_are_measured(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(bytes(2048))
    assert look_at_files(tmp_path, 3).figures["files"] == 2
    look = look_at_process("launch", os.getpid(), 3)
    assert look is not None
    assert look.figures["kB"] > 1000
    with (tmp_path / "more").open("w"):
        again = look_at_process("launch", os.getpid(), 3)
    assert again is not None
    assert again.figures["descriptors"] == look.figures["descriptors"] + 1


def test_steps_are_counted_as_the_file_grows(tmp_path: Path):
    steps = StepCount(tmp_path / "metrics.jsonl")
    assert steps.now() == 0
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n{")
    assert steps.now() == 2
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n{}\n")
    assert steps.now() == 3
