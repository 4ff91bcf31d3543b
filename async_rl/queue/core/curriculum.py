"""Which prompts are sampled again, and how often: by the pass rate of a row's last group (``data.curriculum``).

``prompts.PromptStream`` goes over the rows of a source again and again. At each row it asks ``Curriculum.verdict``
whether the row is sampled or passed over. The answer depends on the place in the order, and on the row's own pass rate,
and on nothing else. So it does not depend on the order in which groups of other rows arrive, and a restarted queue
gives the same answers as long as it has the same records.

Two records outlive the process, in the journal and in snapshots: the pass rate of each row (``PassRate``), and the
places of prompts that were drawn and have not ended (``Place``). Without a curriculum there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np
import xxhash

from async_rl.config.data import CurriculumConfig
from async_rl.queue.storage.journal import Changes

Verdict = Literal["sampled", "aside", "thinned"]
"""What happens to a row when its turn comes. It is sampled, or passed over: because it is set aside, or by chance."""


class PassRate(msgspec.Struct, frozen=True, gc=False):
    """The mean accuracy, 0 to 1, of the newest group of a row, and the epoch in which the row was drawn for it."""

    rate: float
    epoch: int


class Place(msgspec.Struct, frozen=True, gc=False):
    """The place of a prompt in the order of its source, from 0 over all epochs, with the rows that were passed over."""

    index: int


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
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name:
            found.setdefault(name, []).append(row)
    return {name: np.asarray(rows) for name, rows in found.items()}


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

    def open_place(self, position: int, index: int) -> None:
        """Record that the prompt at ``position`` is the one at ``index`` in the order of its source."""
        self.places[position] = place = Place(index)
        self.changes.put("place", str(position), place)

    def close_place(self, position: int) -> None:
        """Forget the place of a prompt that has ended."""
        if self.places.pop(position, None) is not None:
            self.changes.delete("place", str(position))

    def rates(self) -> dict[int, PassRate]:
        """Return the pass rate of every row that has one."""
        known = np.flatnonzero(~np.isnan(self._rates)).tolist()
        return {row: PassRate(float(self._rates[row]), int(self._epochs[row])) for row in known}

    def replace(self, rates: Mapping[int, PassRate], places: Mapping[int, Place]) -> None:
        """Replace all records by those of a snapshot or of the journal. Rates of rows that don't exist are left out."""
        rates = {row: known for row, known in rates.items() if row < len(self._rates)}
        for row in self.rates().keys() - rates.keys():
            self._rates[row] = np.nan
            self.changes.delete("pass_rate", str(row))
        for row, known in rates.items():
            self._set(row, known)
        for position in list(self.places):
            self.close_place(position)
        for position, place in places.items():
            self.open_place(position, place.index)

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
        known = rates[~np.isnan(rates)]
        yield f"{prefix}/aside", float(aside[rows].mean())
        yield f"{prefix}/known", len(known) / len(rates)
        if len(known):
            yield f"{prefix}/pass_rate", float(known.mean())

    def _is_outside(self, rate: float) -> bool:
        low, high = self._config.unsolved_at, self._config.solved_at
        return (low is not None and rate <= low) or (high is not None and rate >= high)

    def _set(self, row: int, known: PassRate) -> None:
        self._rates[row], self._epochs[row] = known.rate, known.epoch
        self.changes.put("pass_rate", str(row), known)
