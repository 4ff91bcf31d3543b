"""The order in which the sources of the training rows take turns. Pure: no state, so a position always gives the same.

``prompts.PromptStream`` asks ``Mixture`` from which source the prompt at a position comes. Rows of one file are a
mixture of one source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


class Mixture:
    """Assigns positions to sources so that every source has its share of any first ``n`` positions, within less than 1.

    The order is that of Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980), section 2. It
    repeats after ``sum(weights)`` positions, with the weights in lowest terms, because each source then has exactly its
    share.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[int]) -> None:
        """Make the order for sources with ``sizes`` rows and whole ``weights``, both at least 1."""
        divisor = math.gcd(*weights)
        self.sizes = tuple(sizes)
        self._weights = tuple(weight // divisor for weight in weights)
        self._sources = _one_period(self._weights)
        # [sources, period + 1]: how many of the first positions of a period belong to each source.
        turns = np.asarray(self._sources) == np.arange(len(sizes))[:, None]
        self._counts = np.concatenate([np.zeros((len(sizes), 1), np.int64), turns.cumsum(axis=1)], axis=1)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and the number of earlier positions of this source."""
        source = self._sources[position % len(self._sources)]
        return source, self.count(source, position)

    def count(self, source: int, position: int) -> int:
        """Return how many of the first ``position`` positions belong to ``source``."""
        periods, rest = divmod(position, len(self._sources))
        return periods * self._weights[source] + int(self._counts[source, rest])

    def end_of(self, epochs: int) -> int:
        """Return the lowest position before which every source has been passed over ``epochs`` times."""
        return max(self._after(source, epochs * size) for source, size in enumerate(self.sizes))

    def epoch(self, position: int) -> int:
        """Return the lowest epoch, from 0, that a source has reached after the first ``position`` positions."""
        return min(max(0, self.count(source, position) - 1) // size for source, size in enumerate(self.sizes))

    def _after(self, source: int, count: int) -> int:
        """Return the number of first positions up to the one with number ``count`` (from 1) of ``source``."""
        periods, rest = divmod(count - 1, self._weights[source])
        return periods * len(self._sources) + int(np.searchsorted(self._counts[source], rest + 1))


def _one_period(weights: Sequence[int]) -> list[int]:
    """Return the sources of the first ``sum(weights)`` positions."""
    period, slack = sum(weights), 2 * len(weights) - 2
    counts = [0] * len(weights)
    order: list[int] = []
    for position in range(1, period + 1):
        # How far each source is behind its share after this position, times ``period``.
        behind = [position * weight - period * count for weight, count in zip(weights, counts, strict=True)]
        # Of the sources that are far enough behind, the one that must come soonest. The lowest index breaks a tie.
        due = min(
            (Fraction(period * (slack - 1) - slack * late, weight), source)
            for source, (late, weight) in enumerate(zip(behind, weights, strict=True))
            if slack * late >= period or not slack
        )[1]
        counts[due] += 1
        order.append(due)
    return order
