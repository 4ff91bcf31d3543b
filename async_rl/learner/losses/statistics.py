"""The table of a loss's statistics: numbers by name that are added over micro-batches and ranks.

An objective declares what it counts (``Statistics``), gives the numbers of each micro-batch by name, and reads those of
the whole step by name. In between they are one flat tensor, so that one sum over ranks is enough. A new statistic is
one entry of the table, its value, and its use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """What an objective counts.

    Attributes:
        sizes: for each name, of how many numbers the statistic is.
    """

    sizes: Mapping[str, int]
    _places: Mapping[str, slice] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ends = accumulate(self.sizes.values())
        places = {name: slice(end - self.sizes[name], end) for name, end in zip(self.sizes, ends, strict=True)}
        object.__setattr__(self, "_places", places)

    @property
    def num_values(self) -> int:
        """The length of the flat tensor."""
        return sum(self.sizes.values())

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the statistics of a micro-batch, float64 [num_values]. Those that are not given are 0.

        Raises:
            KeyError: a name is not in the table.
        """
        sums = next(iter(values.values())).new_zeros(self.num_values, dtype=torch.float64)
        for name, value in values.items():
            sums[self._places[name]] = value.detach().flatten()
        return sums

    def of(self, sums: Tensor, name: str) -> Tensor:
        """Return the numbers of one statistic from the flat tensor: float64 [its size]."""
        return sums[self._places[name]]

    def value(self, sums: Tensor, name: str) -> float:
        """Return a statistic of one number. ``sums`` should be on the host, or the host waits for the device."""
        return self.of(sums, name).item()

    def under(self, sums: Tensor, prefix: str) -> Iterator[tuple[str, float]]:
        """Yield each statistic of one number whose name begins with ``prefix``: the rest of its name, and its value."""
        for name in self.sizes:
            if name.startswith(prefix):
                yield name.removeprefix(prefix), self.value(sums, name)
