"""``benchmarks.pace``: its verdict by hand, and two of its cells."""

from dataclasses import replace

import pytest

from benchmarks.pace import Cell, Event, Outcome, Run, misses

ALONE = Outcome(speed=0.9, age=4.0, late=0.0, allowed_age=5.0, slack=1.2, spent=10.0)


def test_a_cell_that_is_slower_or_older_misses_a_goal():
    assert misses(ALONE, ALONE) == []
    assert misses(ALONE, replace(ALONE, speed=0.883, age=4.03)) == []  # 0.9 * 0.98 = 0.882; 4 * 1.01 = 4.04
    # 200 steps, of which the bound alone trained 10 more out of its stock: 0.855 / 0.9 / 0.95 = 1.
    assert misses(ALONE, replace(ALONE, speed=0.855, spent=0.0)) == [
        "speed 0.950, 1.000 without 10.0 batches spent once"
    ]
    assert misses(ALONE, replace(ALONE, age=5.1)) == ["age 5.10 above 5.00", "age 5.10 above the bound alone's 4.00"]


@pytest.mark.parametrize("event", ["", "one lost"])
def test_a_slower_learner_trains_younger_data_as_quickly(event: Event):
    cell = Cell("recorded", 3.0, bound=16, event=event)
    alone, paced = (Run(cell, run_ahead, 0).outcome() for run_ahead in ("bound", "auto"))
    assert misses(alone, paced) == []
    assert alone.age > 14
    assert paced.age < 3.5
