"""The simulation behind ``benchmarks/on_stale.py``: what must hold whatever the figures are."""

from __future__ import annotations

import pytest

from async_rl.config.queue import OnStale
from benchmarks.simulated import Scenario, simulate


def test_answers_of_one_length_lose_nothing():
    # 256 answers of 500 tokens on 64 slots: a step's sampling takes 2000 decode steps, as long as its training.
    scenario = Scenario(max_staleness=2, on_stale="drop", sigma=0.0, steps=10)
    assert (scenario.sample_time, scenario.train_time) == (2000, 2000)
    outcome = simulate(scenario)
    assert (outcome.dropped, outcome.wasted, outcome.masked, outcome.length) == (0, 0, 0, 1)
    assert outcome.pace == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("on_stale", ["drop", "wait", "mask"])
def test_no_mode_trains_above_the_bound_and_each_loses_in_its_own_way(on_stale: OnStale):
    outcome = simulate(Scenario(max_staleness=1, on_stale=on_stale, steps=10))
    assert outcome.staleness_max == 1
    assert (outcome.dropped > 0) == (on_stale != "mask")
    assert (outcome.masked > 0) == (on_stale == "mask")
    assert outcome.tokens < 1


def test_the_same_seed_gives_the_same_run():
    scenario = Scenario(max_staleness=1, on_stale="wait", steps=5)
    assert simulate(scenario) == simulate(scenario)
