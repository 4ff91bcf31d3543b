"""Everything that touches the learner's device: model, log-probabilities, gradients, optimizer, ranks.

The trainer or ``sft`` gives it the sequences of one optimizer step. It returns ``UpdateStats`` and, on request,
log-probabilities and unsharded parameters, and writes checkpoints. ``Engine``, defined here, is the protocol that
callers use; ``fsdp_engine.FsdpEngine`` implements it. Callers run on rank 0; the other ranks follow its commands
(``ranks.py``).
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
"""The model that ``Engine.score`` uses: the policy with its current weights, or the frozen reference."""


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Statistics of one optimizer step, over all micro-batches and ranks.

    Attributes:
        stepped: False if the optimizer step was skipped: the gradient is not finite, no token is left to train on, or
            a limit is exceeded (``loss.min_ess``, ``loss.max_kl``).
        reason: why the step was skipped; empty if it was not.
        tokens_trained: tokens in the loss.
        ratio_mean, ratio_max: of pi/mu over trained tokens.
        clip_fraction: share of trained tokens whose ratio was clipped at a bound.
        ess: normalised effective sample size, in (0, 1].
        entropy, mean_abs_log_ratio: means over trained tokens, nats.
        skipped_sequence_ids, skipped_tokens: sequences that the loss skipped, and the number of their tokens.
        mismatch_kl: staleness (0, 1, ...) -> (sum of the k3 estimate of KL(mu || pi), number of tokens).
        out_of_range_tokens: number of single tokens outside ``loss.token_range``.
        reference_kl: mean KL in the loss, nats.
        by_lag: float64 [lags, columns], rows for ``losses.diagnostics.summarise``; no rows if nothing was measured.
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
    """The trainer's interface to model, optimizer and ranks."""

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        """Make one optimizer step on ``sequences``. ``version`` is the learner's version before the step."""
        ...

    def score(self, sequences: Sequence[TrainSequence], *, of: ScoredBy) -> Mapping[int, np.ndarray]:
        """Return log-probabilities of each sequence's trained tokens: sequence id to float32 [N], nats, no gradient.

        It computes them as ``update`` does: with temperature, packed, on all ranks. It changes no state.
        """
        ...

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, unsharded, with its Hugging Face name, in a fixed order, on rank 0's host or device.

        It runs collectives on all ranks, so read it to the end before you call another method.
        """
        ...

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write model, optimizer, schedule, random state and ``extra`` (plain data) into ``directory``."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote, on any number of ranks."""
        ...

    def tick(self) -> None:
        """Notify the other ranks that rank 0 is alive, so that they do not time out while rank 0 waits."""
        ...

    def close(self) -> None:
        """Release the other ranks. May be called again."""
        ...
