"""The times of a step's phases: by a clock that the test turns, and of a real step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.learner import phases
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.phases import PhaseClock
from async_rl.learner.ranks import init_ranks
from tests.learner.tiny import random_sequences, tiny_config, tiny_model


def test_the_durations_of_a_phase_add_up_until_they_are_read(monkeypatch: pytest.MonkeyPatch):
    # forward from 1 to 3 and from 7 to 8, backward from 3 to 7.
    ticks = iter([1.0, 3.0, 3.0, 7.0, 7.0, 8.0])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(ticks))
    clock = PhaseClock(torch.device("cpu"))
    for name in ("forward", "backward", "forward"):
        with clock.phase(name):
            pass
    assert clock.read() == {"forward": 3.0, "backward": 4.0}
    assert clock.read() == {}


def test_a_step_reports_its_phases_operations_and_memory(tmp_path: Path):
    config = tiny_config(tmp_path, tiny_model(tmp_path / "model"), learner={"max_tokens": 64})
    engine = FsdpEngine(config, init_ranks(config))
    one, two = (engine.update(random_sequences(n, 24), version=0).cost for n in (3, 6))
    assert one is not None
    assert two is not None
    assert one.phase_s.keys() == two.phase_s.keys() == {"pack", "scatter", "forward", "backward", "optimizer"}
    assert min(one.phase_s.values()) > 0
    assert two.flops == pytest.approx(2 * one.flops)
    assert one.peak_flops_per_s is None
    assert one.peak_memory_bytes > 1e6


def test_the_highest_memory_is_not_forgotten_when_a_step_reads_its_own(monkeypatch: pytest.MonkeyPatch):
    # What torch counts: 60 at the peak of a step, and 2 that stay allocated after it.
    counted = {"peak": 60, "now": 2}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counted["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counted.update(peak=counted["now"]))
    monkeypatch.setitem(phases._highest_bytes, "cuda", 0)
    device = torch.device("cuda")
    assert phases.highest_memory_bytes(device) == 60
    assert phases.peak_memory_bytes(device) == 60
    assert phases.highest_memory_bytes(device) == 60
    assert phases.peak_memory_bytes(device) == 2
    assert phases.highest_memory_bytes(device) == 60
    counted["peak"] = 70
    assert phases.highest_memory_bytes(device) == 70
