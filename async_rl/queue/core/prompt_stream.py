"""The prompt stream: positions that count from 0 over all epochs, each naming one row. Pure.

Every epoch is a seeded order of all rows, so a position alone says which row it is, now and after any restart. The
lease scheduler draws positions; requeued ones (expired, dropped, rolled back) are drawn first, in stream order.
"""

from __future__ import annotations

import heapq

import msgspec
import numpy as np


class StreamCursor(msgspec.Struct):
    """The state of a stream.

    ``position`` is the next one that was never drawn. ``requeued`` is a heap of positions to draw again first.
    """

    position: int = 0
    requeued: list[int] = []


class PromptStream:
    """Positions to sample, in order. If ``epochs`` is None, the stream is endless.

    Raises:
        ValueError: ``num_rows`` is below 1.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True, epochs: int | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"expected at least one training row, got {num_rows}")
        self.num_rows = num_rows
        self._seed, self._shuffle = seed, shuffle
        self._end = None if epochs is None else epochs * num_rows
        self.cursor = StreamCursor()
        self._orders: dict[int, np.ndarray] = {}

    @property
    def position(self) -> int:
        """The next position that was never drawn."""
        return self.cursor.position

    @property
    def requeued(self) -> list[int]:
        """Positions that wait to be drawn again, ascending."""
        return sorted(self.cursor.requeued)

    @property
    def num_requeued(self) -> int:
        return len(self.cursor.requeued)

    @property
    def epoch(self) -> int:
        """The epoch of the newest position drawn (0 before the first)."""
        return max(0, self.cursor.position - 1) // self.num_rows

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to draw."""
        return not self.cursor.requeued and self._end is not None and self.cursor.position >= self._end

    def locate(self, position: int) -> tuple[int, int]:
        """(row, epoch) of a position."""
        epoch, index = divmod(position, self.num_rows)
        return int(self._order(epoch)[index]), epoch

    def draw(self) -> int | None:
        """Draw the next position; None at the end of the last epoch."""
        if self.cursor.requeued:
            return heapq.heappop(self.cursor.requeued)
        if self.exhausted:
            return None
        self.cursor.position += 1
        return self.cursor.position - 1

    def requeue(self, position: int) -> None:
        """Draw this position again, before new ones."""
        heapq.heappush(self.cursor.requeued, position)

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            rows = np.arange(self.num_rows)
            order = np.random.default_rng((self._seed, epoch)).permutation(rows) if self._shuffle else rows
            # Positions in use span a few epochs at most, unless the data set is smaller than the queue.
            while len(self._orders) >= 8:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return order
