"""Steps per second with their error, and seconds of training. Pure: rows of ``metrics.jsonl`` in, numbers out.

Start-up is no training. Before the first step of a start, processes start, load the model, evaluate it once, and wait
for the first batch; with a large model this takes minutes, and it varies from start to start.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean, stdev

from async_rl.run.records.step_log import Row

NUM_BLOCKS = 8
"""Number of blocks of successive steps from whose spread the error of steps/s is computed."""

Startups = Sequence[tuple[float, float]]
"""(begin, end) of every start-up, in ``time_s`` of the run's metrics."""


def find_startups(steps: Sequence[Row], starts: Collection[int]) -> Startups:
    """Return when the run started up: from the step before a start until the learner had its first batch.

    Args:
        steps: the rows of all steps, in order.
        starts: the first steps of the starts. The first row's step always counts as one.
    """
    found: list[tuple[float, float]] = []
    before_s = 0.0
    for number, row in enumerate(steps):
        if number == 0 or row["step"] in starts:
            found.append((before_s, row["time_s"] - row["time/step_s"] + (row.get("time/wait_s") or 0.0)))
        before_s = row["time_s"]
    return found


def training_s(time_s: float, startups: Startups) -> float:
    """Return the seconds of training until ``time_s``, which is without the start-ups before it."""
    return time_s - sum(max(0.0, min(time_s, end_s) - begin_s) for begin_s, end_s in startups)


def relative_error(steps: Sequence[Row]) -> float | None:
    """Return the standard error of the mean time of a step, as a share of it; None with fewer steps than blocks.

    It is computed from the means of successive steps, not of single ones: a slow step makes the next one fast if it
    left groups in the queue, and an evaluation slows several.
    """
    size = len(steps) // NUM_BLOCKS
    if size == 0:
        return None
    seconds = [row["time/step_s"] for row in steps[-size * NUM_BLOCKS :]]
    means = [fmean(seconds[begin : begin + size]) for begin in range(0, len(seconds), size)]
    return stdev(means) / math.sqrt(NUM_BLOCKS) / fmean(means)
