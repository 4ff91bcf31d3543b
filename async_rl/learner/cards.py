"""GPUs by their makers' data sheets, and the rates that kernels and links are assumed to reach on them.

Whoever predicts reads them here: the doctor (``launch.checks.prediction``), ``async-rl init`` and ``benchmarks``; the
learner's MFU is a share of the same peaks. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from async_rl.errors import ConfigError

ATTENTION: Mapping[str, tuple[float, float]] = {
    "auto": (350e12, 280e12),
    **dict.fromkeys(("fa3", "fa4"), (600e12, 480e12)),
}
"""Operations/s of attention's forward and backward pass by ``model.attention``, on an H100, by its authors
(arXiv:2307.08691 and 2407.08608; version 4 is assumed to be as fast as 3). A card with a lower peak reaches at most 0.6
and 0.5 of that peak."""
COPIED, DECODED, COMPUTED = 0.806, 0.746, 0.627
"""Shares of a card's bandwidth that kernels reach, and vLLM while it decodes (2.7 and 2.5 of an H100's 3.35 TB/s); and
of its peak that matrix products reach (620 of 989 T). Assumed."""
NVLINK, BETWEEN_NODES, PCIE = 200e9, 40e9, 50e9
"""Bytes/s of a collective between the GPUs of a node, of one over nodes with 400 Gbit/s for each GPU, and of pinned
copies between a GPU and its host. Assumed: half to nine tenths of what the links' makers state."""
HASH, HASH_ALL = 10e9, 40e9
"""Bytes/s of digests by one thread, and by all threads of staging. Assumed."""
DECODE_S = 2.5e-3
"""Seconds of a decode step of vLLM that are not reading weights, keys and values. Assumed."""
HOST_BYTES = 200e9
"""Memory of the host for each GPU where none is given: nodes of 8 GPUs are sold with 1.5 to 2 TB."""
SECONDS_ERROR = (0.7, 1.6)
"""A predicted time times these is its range. Kernels on an H200 (lent, only kernels were timed) reached 1.1 to 1.3
times these shares; waits of the host, uneven ranks and prefills are in no sum."""


class Card(NamedTuple):
    """A GPU: words of its name; dense bfloat16 operations/s with sums in float32; bytes of memory that torch finds,
    where they are known, else a little below the data sheet's; the memory's bytes/s.
    """

    words: tuple[str, ...]
    peak: float
    memory_bytes: float
    bandwidth: float

    def attended_per_s(self, kernel: str = "auto") -> tuple[float, float]:
        """Return the operations/s of a ``kernel`` of ``ATTENTION``, forward and backward."""
        forward, backward = ATTENTION[kernel]
        return min(forward, 0.6 * self.peak), min(backward, 0.5 * self.peak)


_GIB = 2.0**30
CARDS: tuple[Card, ...] = (
    Card(("H100", "PCIe"), 756e12, 79.1 * _GIB, 2.0e12),
    Card(("H100", "NVL"), 835e12, 93.0 * _GIB, 3.9e12),
    Card(("H100",), 989e12, 79.1 * _GIB, 3.35e12),
    Card(("H200", "NVL"), 836e12, 139.8 * _GIB, 4.8e12),
    Card(("H200",), 989e12, 139.8 * _GIB, 4.8e12),
    Card(("GH200",), 989e12, 94.5 * _GIB, 4.0e12),
    Card(("H20",), 148e12, 95.0 * _GIB, 4.0e12),
    Card(("B200",), 2250e12, 178.0 * _GIB, 8.0e12),
    Card(("A100",), 312e12, 79.1 * _GIB, 2.0e12),
    Card(("A10",), 125e12, 22.0 * _GIB, 0.6e12),
    Card(("A6000",), 155e12, 47.4 * _GIB, 0.77e12),
    Card(("L40S",), 362e12, 44.3 * _GIB, 0.86e12),
    Card(("L40",), 181e12, 44.3 * _GIB, 0.86e12),
    Card(("L4",), 121e12, 22.0 * _GIB, 0.3e12),
    Card(("4090",), 165e12, 23.5 * _GIB, 1.0e12),
    Card(("3090",), 71e12, 23.5 * _GIB, 0.94e12),
)
"""By the makers' data sheets; of the A100 the model of 80 GB. The first row whose words are all in a name counts."""


def card_of(device_name: str) -> Card | None:
    """Return the card of a device, as torch or a user names it. None if it is not known."""
    words = {word.lower() for word in re.split(r"[^A-Za-z0-9]+", device_name)}
    return next((card for card in CARDS if words.issuperset(word.lower() for word in card.words)), None)


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes with GPUs that are not here.

    Attributes:
        name: as the user wrote it.
        num_nodes: number of nodes.
        num_gpus: number of GPUs of each.
        host_bytes: each host's memory.
    """

    name: str
    card: Card
    num_nodes: int
    num_gpus: int
    host_bytes: float

    @property
    def total_gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.num_nodes * self.num_gpus

    def link(self, num_gpus: int) -> float:
        """Return the bytes/s of a collective between so many GPUs."""
        return NVLINK if num_gpus <= self.num_gpus else BETWEEN_NODES

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Read machines such as ``8xH100``, ``2x8xH100`` (two nodes) or ``8xH100,1500GB`` (each host's memory).

        Raises:
            ConfigError: they are written otherwise, or the card is not in ``CARDS``. It names the ``option``.
        """
        match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([A-Za-z0-9 _-]+?)(?:,([1-9]\d*)GB)?", text)
        card = match and card_of(match[3])
        if not match or not card:
            known = ", ".join("-".join(card.words) for card in CARDS)
            raise ConfigError(
                f"{option}: expected GPUs such as 8xH100, 2x8xH100 (two nodes) or 8xH100,1500GB (each host's memory), "
                f"of {known}, got {text!r}; name one of these"
            )
        number = int(match[2])
        host_bytes = int(match[4]) * 1e9 if match[4] else number * HOST_BYTES
        return cls(text, card, int(match[1] or 1), number, host_bytes)
