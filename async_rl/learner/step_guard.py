"""Count skipped optimizer steps in a row; stop the run with a diagnosis if there are too many.

The engine skips a step past the limits of ``[loss]``, with a gradient that is not finite, or with nothing left to train
on. The trainer calls this after every step; the count survives restarts (``TrainerState.skipped_in_a_row``).
"""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.config.loss import LossConfig
from async_rl.errors import TrainingError
from async_rl.learner.engine.protocol import UpdateStats


def count_skipped(skipped_in_a_row: int, updates: Sequence[UpdateStats | None]) -> int:
    """The count after ``updates``, from the count before; None is an update in which everything was masked."""
    for update in updates:
        skipped_in_a_row = 0 if update is not None and update.stepped else skipped_in_a_row + 1
    return skipped_in_a_row


def check_skipped(skipped_in_a_row: int, last: UpdateStats | None, loss: LossConfig) -> None:
    """Check that the run may go on after ``skipped_in_a_row`` skipped optimizer steps; ``last`` is the last one.

    Raises:
        TrainingError: there are more than ``loss.max_skipped_steps``; the message has measurements and remedies.
    """
    if skipped_in_a_row <= loss.max_skipped_steps:
        return
    raise TrainingError(
        f"{skipped_in_a_row} optimizer steps in a row were skipped, loss.max_skipped_steps = {loss.max_skipped_steps}. "
        f"The last: {_measured(last)}. If mismatch_kl is large at lag 0, generators and learner compute differently "
        f"with the same weights: compare dtype, temperature and engine. If it grows with the lag, lower "
        f"queue.max_staleness or optimizer.lr. If neither, relax loss.min_ess or loss.max_kl. If the gradient is not "
        f"finite, lower optimizer.lr or check the rewards. If nothing is left to train on, masked/* in metrics.jsonl "
        f"says why"
    )


def _measured(last: UpdateStats | None) -> str:
    if last is None:
        return "every token of it was masked"
    lags = {lag: total / tokens for lag, (total, tokens) in sorted(last.mismatch_kl.items()) if tokens}
    by_lag = ", ".join(f"{kl:.3g} at lag {lag}" for lag, kl in lags.items())
    return (
        f"{last.reason} (ESS {last.ess:.3g}, ratio mean {last.ratio_mean:.3g} and max {last.ratio_max:.3g}, gradient "
        f"norm {last.grad_norm:.3g}; mismatch_kl in nats: {by_lag or 'of no token'})"
    )
