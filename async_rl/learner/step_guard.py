"""Skipped optimizer steps in a row: counted, and past the budget the run stops with a diagnosis.

The engine skips a step past the limits of ``[loss]``, with a gradient that is not finite, or with nothing left to train
on; the trainer counts here, over restarts too (``TrainerState.skipped_in_a_row``).
"""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.config.loss import LossConfig
from async_rl.errors import TrainingError
from async_rl.learner.engine.protocol import UpdateStats


def count_skipped(skipped_in_a_row: int, updates: Sequence[UpdateStats | None]) -> int:
    """The number after ``updates``, from the one before; None is an update in which everything was masked."""
    for update in updates:
        skipped_in_a_row = 0 if update is not None and update.stepped else skipped_in_a_row + 1
    return skipped_in_a_row


def check_skipped(skipped_in_a_row: int, last: UpdateStats | None, loss: LossConfig) -> None:
    """Whether the run may go on after ``skipped_in_a_row`` skipped optimizer steps, of which ``last`` is the last.

    Raises:
        TrainingError: they are more than ``loss.max_skipped_steps``; it says what was measured and what may help.
    """
    if skipped_in_a_row <= loss.max_skipped_steps:
        return
    raise TrainingError(
        f"{skipped_in_a_row} optimizer steps in a row were skipped, loss.max_skipped_steps = {loss.max_skipped_steps}. "
        f"The last: {_measured(last)}. A mismatch at lag 0 means that generators and learner differ about the same "
        f"weights (dtype, temperature, engine); one that grows with the lag asks for a lower queue.max_staleness or "
        f"optimizer.lr; where neither holds, relax loss.min_ess or loss.max_kl. A gradient that is not finite asks for "
        f"a lower optimizer.lr or a look at the rewards; masked/* in metrics.jsonl says why nothing is left to train on"
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
