"""The learner's engine: everything that touches the device. The trainer's loop sees only this protocol.

Rank 0 calls; the other ranks follow (``parallel.py``), so ranks can't disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from async_rl.learner.packing import TrainSequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """One optimizer step, summed over micro-batches and ranks.

    ``stepped`` is False when the optimizer step was skipped (a non-finite gradient, or nothing left to train on);
    ``reason`` says why. ``tokens_trained`` and ``sequences_skipped`` count after the skip threshold. Ratios are pi/mu
    over trained tokens; ``ess`` is the normalised effective sample size in (0, 1]. ``mismatch_kl`` maps staleness (0,
    1, ...) to (sum of the k3 estimate of KL(mu || pi), tokens).
    """

    stepped: bool
    reason: str
    loss: float
    grad_norm: float
    lr: float
    tokens_trained: int
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    ess: float
    entropy: float
    mean_abs_log_ratio: float
    skipped_sequence_ids: tuple[int, ...] = ()
    skipped_tokens: int = 0
    mismatch_kl: Mapping[int, tuple[float, int]] = field(default_factory=dict)


class Engine(Protocol):
    """Model, optimizer and ranks, as the trainer's loop uses them."""

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        """One optimizer step on these sequences. ``version`` is the learner's before it (for staleness splits)."""
        ...

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, in Hugging Face names and a fixed order, on rank 0's host or device, wire dtype.

        Runs collectives on all ranks: it must be exhausted before anything else is called.
        """
        ...

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Model, optimizer, schedule and RNG into ``directory`` (not yet committed), ``extra`` (plain data) beside."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote, on any number of ranks."""
        ...

    def tick(self) -> None:
        """Keep the other ranks from timing out while rank 0 waits."""
        ...

    def close(self) -> None:
        """Release the other ranks. May be called again."""
        ...
