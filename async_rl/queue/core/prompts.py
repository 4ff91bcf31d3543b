"""The stream of training prompts: the order in which rows are sampled, and sampled again.

A prompt's position in the stream counts from 0 over all epochs. ``Mixture`` says from which source of rows it comes.
The rows of each epoch of a source are shuffled with a seed, so a position alone determines its row, also after a
restart. ``Retries.draw`` draws positions. Positions whose lease expired, or whose group was dropped or rolled back, are
drawn again before new ones.

Under a ``Curriculum`` (``data.curriculum``) the stream passes over rows: it asks at each row whether it is sampled. The
answer depends on the place in the order, and on the pass rate of the row's own last group, and on nothing else. So it
does not depend on the order in which groups of other rows arrive, and a restarted queue gives the same answers as long
as it has the same records. Two records outlive the process, in the journal and in snapshots: the pass rate of each row
(``PassRate``), and the places of prompts that were drawn and have not ended (``Place``).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import xxhash

from async_rl.config.config import Config
from async_rl.config.data import CurriculumConfig
from async_rl.queue.storage.journal import Changes

Verdict = Literal["sampled", "aside", "thinned"]
"""What happens to a row when its turn comes. It is sampled, or passed over: because it is set aside, or by chance."""


class Row(Protocol):
    """A row of a dataset: the messages of its prompt, the data that its reward needs, and the name of its source."""

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]: ...
    @property
    def reward_data(self) -> Mapping[str, Any]: ...
    @property
    def source(self) -> str: ...


class StreamCursor(msgspec.Struct):
    """The place in the stream of training prompts, as the journal and snapshots store it.

    ``position`` is the lowest position that was never drawn. ``requeued`` is a heap of the positions to draw again
    first. ``aside`` and ``thinned`` are the numbers of rows of each source that a curriculum has passed over, by cause.
    ``state`` is that of ``data.source`` after the last row that was drawn; empty before the first.
    """

    position: int = 0
    requeued: list[int] = []
    aside: Counter[int] = msgspec.field(default_factory=Counter)
    thinned: Counter[int] = msgspec.field(default_factory=Counter)
    state: str = ""

    def num_passed(self, source: int) -> int:
        """Return how many rows of ``source`` were passed over."""
        return self.aside[source] + self.thinned[source]


class PromptStream:
    """The order in which training prompts are sampled, as positions. The stream has no end if ``epochs`` is None.

    By default all rows are one source. With ``weights``, the rows are those of several sources, one source after the
    other, with ``sizes`` rows each. Sources take turns by their weights. A curriculum may pass over rows. The sources'
    shares of the drawn prompts stay the same, and an epoch of a source has the rows that were passed over, too.

    Raises:
        ValueError: ``num_rows`` is below 1.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        weights: Sequence[int] = (1,),
        sizes: Sequence[int] = (),
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"data.train: expected at least one row, got {num_rows}; add rows to it")
        self.num_rows = num_rows
        self._seed, self._shuffle = seed, shuffle
        self._mixture = Mixture(sizes or (num_rows,), weights)
        self._first_rows = [0, *itertools.accumulate(self._mixture.sizes)]
        self._epochs, self._end = epochs, 0 if epochs is None else self._mixture.end_of(epochs)
        self.cursor = StreamCursor()
        self.is_starved = False
        """Whether no position could be drawn when one was wanted last, although the data has not ended."""
        self.curriculum = Curriculum(curriculum or CurriculumConfig(), num_rows, seed=seed)
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    @classmethod
    def of_config(cls, config: Config, rows: Sequence[Row]) -> PromptStream:
        """Make the stream of the training rows of ``config``."""
        sizes = Counter(row.source for row in rows) if config.data.weights else {}
        return cls(
            len(rows), seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.data.epochs,
            weights=[config.data.weights[source] for source in sizes] or (1,), sizes=list(sizes.values()),
            curriculum=config.data.curriculum,
        )  # fmt: skip

    @property
    def most_prompts_left(self) -> float:
        """Limit on the number of prompts that may still be drawn; infinite if the stream has no end.

        A curriculum may pass over some of them.
        """
        if self._epochs is None:
            return math.inf
        return (0 if self.is_at_end else self._end - self.position) + self.num_requeued

    def why_stopped(self) -> str:
        """Return why no further prompt comes, although the data has not ended; empty if nothing is wrong."""
        return ""

    def why_starved(self) -> str:
        """Return what the next prompt waits for, if it waits for something; else an empty text."""
        return ""

    def has_grown(self) -> bool:
        """Return whether ``is_starved`` has ended since the last call."""
        return False

    @property
    def position(self) -> int:
        """The lowest position that was never drawn."""
        return self.cursor.position

    @property
    def num_requeued(self) -> int:
        return len(self.cursor.requeued)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the newest prompt drawn from the source whose epoch is the lowest; 0 if none was."""
        return min(self._epoch(source) for source in range(len(self._mixture.sizes)))

    @property
    def has_sources(self) -> bool:
        """Whether the rows are those of several sources that take turns."""
        return len(self._mixture.sizes) > 1

    @property
    def exhausted(self) -> bool:
        """Whether there is no position left to draw."""
        return not self.cursor.requeued and self.is_at_end

    @property
    def is_at_end(self) -> bool:
        """Whether all new positions are drawn."""
        if self._epochs is None:
            return False
        if not self.num_passed:
            return self.cursor.position >= self._end
        sizes = self._mixture.sizes
        return all(self._next_index(source) >= self._epochs * size for source, size in enumerate(sizes))

    @property
    def num_passed(self) -> int:
        """The number of rows that a curriculum has passed over, each as often as it was."""
        return self.cursor.aside.total() + self.cursor.thinned.total()

    @property
    def row_epochs(self) -> np.ndarray:
        """The epoch of its source for each row, int64 [rows]."""
        sizes = self._mixture.sizes
        return np.repeat([self._epoch(source) for source in range(len(sizes))], sizes)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the dataset row of a position, and the epoch of its source.

        Under a curriculum, the position must be that of a prompt that was drawn and has not ended.
        """
        source, index = self._mixture.locate(position)
        place = self.curriculum.places.get(position)
        return self._row(source, index if place is None else place.index)

    def draw(
        self, avoid: Callable[[int], bool] = lambda position: False, tries: Callable[[int], int] = lambda position: 0
    ) -> int | None:
        """Return the next position to sample; None at the end of the last epoch.

        Requeued positions come first, but those that ``avoid`` names come last, the one with the fewest ``tries``
        first. Rows that the curriculum passes over are counted in the cursor, also if None is returned.
        """
        position = pop_first(self.cursor.requeued, avoid)
        if position is None:
            position = self._draw_new()
        return pop_least(self.cursor.requeued, tries) if position is None and self.cursor.requeued else position

    def _draw_new(self) -> int | None:
        position = self.cursor.position
        source = self._mixture.locate(position)[0]
        while not self.is_at_end:
            index = self._next_index(source)
            verdict = self.curriculum.verdict(*self._row(source, index), source, index)
            if verdict == "sampled":
                if self.cursor.num_passed(source):
                    self.curriculum.open_place(position, Place(index))
                self.cursor.position += 1
                return position
            (self.cursor.aside if verdict == "aside" else self.cursor.thinned)[source] += 1
        return None

    def observe(self, position: int, rate: float) -> None:
        """Record the mean accuracy of the group of the prompt at ``position`` for the curriculum."""
        if self.curriculum.is_on:
            self.curriculum.observe(*self.locate(position), rate)

    def _next_index(self, source: int) -> int:
        """Return the place, in the order of ``source``, of the first row that was neither drawn nor passed over."""
        return self._mixture.count(source, self.cursor.position) + self.cursor.num_passed(source)

    def _epoch(self, source: int) -> int:
        return max(0, self._next_index(source) - 1) // self._mixture.sizes[source]

    def _row(self, source: int, index: int) -> tuple[int, int]:
        epoch, place = divmod(index, self._mixture.sizes[source])
        return self._first_rows[source] + int(self._order(source, epoch)[place]), epoch

    def requeue(self, position: int) -> None:
        """Put a position back, to be drawn again before new positions."""
        heapq.heappush(self.cursor.requeued, position)

    def _order(self, source: int, epoch: int) -> np.ndarray:
        order = self._orders.get((source, epoch))
        if order is None:
            rows = np.arange(self._mixture.sizes[source])
            seed = (self._seed, epoch, source) if source else (self._seed, epoch)
            order = np.random.default_rng(seed).permutation(rows) if self._shuffle else rows
            # Positions in use span a few epochs at most, unless the data set is smaller than the queue.
            while len(self._orders) >= 8 * len(self._mixture.sizes):
                del self._orders[next(iter(self._orders))]
            self._orders[source, epoch] = order
        return order


def pop_first(heap: list[int], avoid: Callable[[int], bool]) -> int | None:
    """Remove and return the lowest number of a heap that ``avoid`` does not name; None if there is none."""
    avoided: list[int] = []
    while heap and avoid(heap[0]):
        avoided.append(heapq.heappop(heap))
    lowest = heapq.heappop(heap) if heap else None
    for number in avoided:
        heapq.heappush(heap, number)
    return lowest


def pop_least(heap: list[int], tries: Callable[[int], int]) -> int:
    """Remove and return the number of a heap that has the fewest ``tries``, the lowest of several.

    So each of them gets its turn: the lowest one may fail for ever, and the others only during an outage.
    """
    least_tried = min(heap, key=lambda number: (tries(number), number))
    heap.remove(least_tried)
    heapq.heapify(heap)
    return least_tried


# Sources that take turns.


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


# Rows that are passed over.


class PassRate(msgspec.Struct, frozen=True, gc=False):
    """The mean accuracy, 0 to 1, of the newest group of a row, and the epoch in which the row was drawn for it."""

    rate: float
    epoch: int


class OwnRow(msgspec.Struct, frozen=True):
    """A row of ``data.source``. Its attributes are those of ``Row``."""

    messages: tuple[Mapping[str, str], ...]
    reward_data: Mapping[str, Any]
    source: str = ""


class Place(msgspec.Struct, frozen=True):
    """The place of a prompt in the order of its source, from 0 over all epochs, with the rows that were passed over.

    ``row`` is the prompt's row if ``data.source`` has given it.
    """

    index: int
    row: OwnRow | None = None


def chance(config: CurriculumConfig, rate: float) -> float:
    """Return the probability, 0 to 1, with which a row of pass rate ``rate`` is sampled when its turn comes.

    ``learnability`` is p(1 - p), the variance of a right answer (arXiv:2502.12272, section 3), scaled to at most 1. It
    is also the expected square of the advantage of a group without division by the standard deviation. ``failures`` is
    1 - p, the prioritized sampling of Kimi k1.5 (arXiv:2501.12599, section 2.3.4). Neither paper has a lower limit.
    """
    weight = {"uniform": 1.0, "learnability": 4 * rate * (1 - rate), "failures": 1 - rate}[config.chance]
    return max(config.min_chance, weight)


def rows_by_source(names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the rows of each named source, int64, in the order of their first rows. ``names`` has one for each row."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name:
            rows_of.setdefault(name, []).append(row)
    return {name: np.asarray(rows) for name, rows in rows_of.items()}


class Curriculum:
    """The pass rates of the rows, the places of open prompts, and the rule that says which rows are sampled.

    ``changes`` collects the records to write to the journal. The owner of the stream sets it.
    """

    def __init__(self, config: CurriculumConfig, num_rows: int, *, seed: int) -> None:
        self._config, self._seed = config, seed
        self._rates = np.full(num_rows, np.nan)
        self._epochs = np.zeros(num_rows, np.int64)
        self.places: dict[int, Place] = {}
        self.changes = Changes(is_wanted=False)

    @property
    def is_on(self) -> bool:
        return self._config.is_on

    def verdict(self, row: int, epoch: int, source: int, index: int) -> Verdict:
        """Return whether ``row`` is sampled in this epoch.

        ``index`` is its place in the order of ``source``. The random number of the decision is a hash of both.
        """
        rate = float(self._rates[row])
        if not self.is_on or np.isnan(rate):
            return "sampled"
        if self._is_outside(rate) and epoch - self._epochs[row] <= self._config.rest_epochs:
            return "aside"
        number = xxhash.xxh3_64_intdigest(f"{self._seed}/curriculum/{source}/{index}".encode()) / 2**64
        return "sampled" if number < chance(self._config, rate) else "thinned"

    def observe(self, row: int, epoch: int, rate: float) -> None:
        """Record the mean accuracy of a group of ``row`` that was drawn in ``epoch``.

        A group of an earlier epoch than the recorded one changes nothing.
        """
        if self.is_on and (np.isnan(self._rates[row]) or epoch >= self._epochs[row]):
            self._set(row, PassRate(rate, epoch))

    def open_place(self, position: int, place: Place) -> None:
        """Record the place of the prompt at ``position``."""
        self.places[position] = place
        self.changes.put("place", str(position), place)

    def close_place(self, position: int) -> None:
        """Forget the place of a prompt that has ended."""
        if self.places.pop(position, None) is not None:
            self.changes.delete("place", str(position))

    def rates(self) -> dict[int, PassRate]:
        """Return the pass rate of every row that has one."""
        rated_rows = np.flatnonzero(~np.isnan(self._rates)).tolist()
        return {row: PassRate(float(self._rates[row]), int(self._epochs[row])) for row in rated_rows}

    def replace(self, rates: Mapping[int, PassRate], places: Mapping[int, Place]) -> None:
        """Replace all records by those of a snapshot or of the journal. Rates of rows that don't exist are left out."""
        rates = {row: pass_rate for row, pass_rate in rates.items() if row < len(self._rates)}
        for row in self.rates().keys() - rates.keys():
            self._rates[row] = np.nan
            self.changes.delete("pass_rate", str(row))
        for row, pass_rate in rates.items():
            self._set(row, pass_rate)
        for position in list(self.places):
            self.close_place(position)
        for position, place in places.items():
            self.open_place(position, place)

    def metrics(self, epochs: np.ndarray, sources: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return figures of the rows' pass rates for ``metrics.jsonl``.

        Args:
            epochs: int64 [rows], the epoch of each row's source.
            sources: the rows of each named source, int64.
        """
        outside = np.zeros(len(self._rates), bool)
        for limit, beyond in ((self._config.solved_at, np.greater_equal), (self._config.unsolved_at, np.less_equal)):
            if limit is not None:
                outside |= beyond(self._rates, limit)
        aside = outside & (epochs - self._epochs <= self._config.rest_epochs)
        metrics = dict(self._figures("curriculum", aside, np.arange(len(aside))))
        for name, rows in sources.items():
            metrics.update(self._figures(f"source/{name}", aside, rows))
        return metrics

    def _figures(self, prefix: str, aside: np.ndarray, rows: np.ndarray) -> Iterator[tuple[str, float]]:
        rates = self._rates[rows]
        known_rates = rates[~np.isnan(rates)]
        yield f"{prefix}/aside", float(aside[rows].mean())
        yield f"{prefix}/known", len(known_rates) / len(rates)
        if len(known_rates):
            yield f"{prefix}/pass_rate", float(known_rates.mean())

    def _is_outside(self, rate: float) -> bool:
        low, high = self._config.unsolved_at, self._config.solved_at
        return (low is not None and rate <= low) or (high is not None and rate >= high)

    def _set(self, row: int, pass_rate: PassRate) -> None:
        self._rates[row], self._epochs[row] = pass_rate.rate, pass_rate.epoch
        self.changes.put("pass_rate", str(row), pass_rate)
