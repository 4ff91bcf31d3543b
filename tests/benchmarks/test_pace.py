"""``benchmarks.pace``: two of its cells."""

import pytest

from benchmarks.pace import Cell, Event, Run, misses


@pytest.mark.parametrize("event", ["", "one lost"])
def test_a_slower_learner_trains_younger_data_as_quickly(event: Event):
    cell = Cell("recorded", 3.0, bound=16, event=event)
    alone, paced = (Run(cell, run_ahead, 0).outcome() for run_ahead in ("bound", "auto"))
    assert misses(alone, paced) == []
    assert alone.age > 14
    assert paced.age < 3.5
