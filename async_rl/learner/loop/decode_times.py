"""How the time of a decode step grows with the sequences that run: a line, fitted to what generators report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.queue.messages import Decoded


def decode_times(decoded: Sequence[Decoded]) -> tuple[float, float] | None:
    """Return seconds ``(a, b)`` such that a decode step of n sequences takes about ``a + b n``; None if none was
    measured.

    The least squares of all decode steps, each with the mean of those with about as many sequences. Neither part is
    negative: where one would be, the line is fitted without it.
    """
    table = np.array([(d.busy_s, d.busy_sequence_s, d.num_tokens) for d in decoded], np.float64).reshape(-1, 3)
    busy_s, sequence_s, tokens = table[(table > 0).all(axis=1)].T
    if not len(tokens):
        return None
    running, step_s = sequence_s / busy_s, sequence_s / tokens
    steps = tokens / running
    mean_running, mean_s = np.average(running, weights=steps), np.average(step_s, weights=steps)
    spread = np.sum(steps * (running - mean_running) ** 2)
    slope = np.sum(steps * (running - mean_running) * (step_s - mean_s)) / spread if len(tokens) > 1 else 0.0
    slope = max(0.0, slope)
    if (level := mean_s - slope * mean_running) < 0:
        level, slope = 0.0, np.sum(steps * running * step_s) / np.sum(steps * running**2)
    return float(level), float(slope)
