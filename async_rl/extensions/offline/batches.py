"""Chooses the rows of each step, by the seed and the step only, so that a resumed run sees the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Row = TypeVar("Row")


def batch_of(rows: Sequence[Row], step: int, *, batch_size: int, seed: int, epochs: int | None = None) -> list[Row]:
    """Return the rows of ``step``, counted from 0.

    Every epoch has its own random order, from ``seed``. The epochs are placed one after the other and cut into batches.
    After ``epochs`` of them no row is left, so the last batch may be smaller.
    """
    size = len(rows)
    end = (step + 1) * batch_size if epochs is None else min((step + 1) * batch_size, epochs * size)
    positions = range(step * batch_size, end)
    numbers = range(positions[0] // size, positions[-1] // size + 1)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(size) for epoch in numbers}
    return [rows[orders[position // size][position % size]] for position in positions]
