"""The learner's engine: everything that touches the device. The trainer's loop sees only this protocol.

Rank 0 calls; the other ranks follow (``ranks.py``), so ranks can't disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from async_rl.learner.packing import TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

ScoredBy = Literal["policy", "reference"]
"""Whose log-probabilities ``Engine.score`` gives: the weights as they are now, or the frozen reference model."""


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """One optimizer step, summed over micro-batches and ranks.

    ``stepped`` is False when the optimizer step was skipped (a non-finite gradient, nothing left to train on, or a
    limit of the step guard passed: ``loss.min_ess``, ``loss.max_kl``); ``reason`` says why. ``tokens_trained`` counts
    what the loss kept; ``skipped_tokens`` are those of skipped sequences, ``out_of_range_tokens`` single ones outside
    ``loss.token_range``. Ratios are pi/mu over trained tokens, ``clip_fraction`` their share that was cut at a bound;
    ``ess`` is the normalised effective sample size in (0, 1]. ``mismatch_kl`` maps staleness (0, 1, ...) to (sum of
    the k3 estimate of KL(mu || pi), tokens). ``reference_kl`` is the mean KL in the loss, nats. ``by_lag`` is float64
    [lags, columns] for ``losses.diagnostics.summarise``; no rows where nothing was measured.
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
    out_of_range_tokens: int = 0
    reference_kl: float = 0.0
    by_lag: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))


class Engine(Protocol):
    """Model, optimizer and ranks, as the trainer's loop uses them."""

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        """One optimizer step on these sequences. ``version`` is the learner's before it (for staleness splits)."""
        ...

    def score(self, sequences: Sequence[TrainSequence], *, of: ScoredBy) -> Mapping[int, np.ndarray]:
        """Log-probabilities of each sequence's trained tokens: sequence id to float32 [its N], nats, no gradient.

        Tempered like those of ``update``, and computed the same way, packed and on all ranks. Changes nothing.
        """
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
