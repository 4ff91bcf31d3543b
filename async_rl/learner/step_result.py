"""What one step did: which tokens it trained on and how old they were, which it left out and why.

The trainer makes a ``StepResult`` after the updates of a batch. The ack, the staleness controller and the metrics read
it.

``count_skipped`` and ``check_skipped`` stop the run with a diagnosis when too many optimizer steps in a row were
skipped. The engine skips a step past the limits of ``[loss]``, with a gradient that is not finite, or with nothing left
to train on. The count survives restarts (``TrainerState.skipped_in_a_row``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.config.loss import LossConfig
from async_rl.errors import TrainingError
from async_rl.learner.batch import MASK_CAUSES, PreparedBatch
from async_rl.learner.engine.protocol import UpdateStats
from async_rl.queue.messages import TakenGroup, TrainedCounts


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """Staleness of the trained tokens, in versions: at training, and its parts before and after arrival."""

    mean: float = 0.0
    max: int = 0
    in_flight_mean: float = 0.0
    in_queue_mean: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """One step on one batch.

    Attributes:
        groups: what the queue handed over.
        prepared: the sequences made of them, with their advantages.
        updates: one for each part of the batch; None for a part in which everything was masked.
        version: the learner's, before the first update.
        staleness: of the tokens that were trained on.
        facts: what became of every rollout and token, for the ledger.
    """

    groups: tuple[TakenGroup, ...]
    prepared: PreparedBatch
    updates: tuple[UpdateStats | None, ...]
    version: int
    staleness: StalenessSummary
    facts: TrainedCounts

    @property
    def measured(self) -> list[UpdateStats]:
        """The updates that the engine ran, skipped optimizer steps included."""
        return [update for update in self.updates if update is not None]


def step_result(
    groups: tuple[TakenGroup, ...], prepared: PreparedBatch, updates: Sequence[UpdateStats | None], *, version: int
) -> StepResult:
    """Summarise ``updates`` on ``prepared``; ``version`` is the learner's before the first of them."""
    measured = [update for update in updates if update is not None]
    return StepResult(
        groups=groups,
        prepared=prepared,
        updates=tuple(updates),
        version=version,
        staleness=staleness_summary(prepared, versions=_versions_trained(version, updates)),
        facts=trained_counts(
            prepared,
            [i for update in measured for i in update.skipped_sequence_ids],
            stepped=[update is not None and update.stepped for update in updates],
            out_of_range=sum(update.out_of_range_tokens for update in measured if update.stepped),
        ),
    )


def _versions_trained(version: int, updates: Sequence[UpdateStats | None]) -> list[int]:
    """The learner's version before each update, from ``version`` before the first."""
    versions: list[int] = []
    for update in updates:
        versions.append(version)
        version += update is not None and update.stepped
    return versions


def staleness_summary(prepared: PreparedBatch, *, versions: Sequence[int]) -> StalenessSummary:
    """Token-weighted staleness of what ``prepared`` trains on, each update at its own of ``versions``."""
    ages, waits = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequences, version in zip(prepared.updates, versions, strict=True):
        counts = [prepared.sequence_tokens[s.sequence_id] for s in sequences]
        arrivals = [prepared.arrival_versions[s.sequence_id] for s in sequences]
        ages += [version - s.versions[s.loss_mask] for s in sequences]
        waits.append(version - np.repeat(np.array(arrivals, dtype=np.int64), counts))
    age, wait = np.concatenate(ages), np.concatenate(waits)
    if not len(age):
        return StalenessSummary()
    # A token sampled with a version announced while its group was on the way is not older in flight than 0.
    in_flight = np.maximum(age - wait, 0)
    return StalenessSummary(float(age.mean()), int(age.max()), float(in_flight.mean()), float((age - in_flight).mean()))


def trained_counts(
    prepared: PreparedBatch, skipped_sequence_ids: Sequence[int], *, stepped: Sequence[bool], out_of_range: int = 0
) -> TrainedCounts:
    """What became of every rollout and token of the step. A rollout is skipped when all its sequences were.

    Args:
        prepared: what was trained on.
        skipped_sequence_ids: sequences that the loss left out (``loss.skip_threshold``).
        stepped: for each update, whether the optimizer stepped; if not, nothing of that part was trained.
        out_of_range: number of single tokens that ``loss.token_range`` left out, in updates that stepped.
    """
    causes = dict.fromkeys(
        (s.sequence_id for update, did in zip(prepared.updates, stepped, strict=True) if not did for s in update),
        "step_skipped",
    )
    causes |= dict.fromkeys(skipped_sequence_ids, "skip_threshold")
    rollouts_masked = Counter(prepared.masked.values())
    tokens_masked: Counter[str] = Counter()
    for rollout, cause in prepared.masked.items():
        tokens_masked[cause] += prepared.rollout_tokens[rollout]
    if prepared.stale_tokens:
        tokens_masked["stale"] += prepared.stale_tokens
    for sequence, cause in causes.items():
        tokens_masked[cause] += prepared.sequence_tokens[sequence]
    if out_of_range:
        tokens_masked["token_range"] += out_of_range
    outcomes: dict[int, set[str]] = {}
    for sequence, rollout in prepared.rollout_of.items():
        outcomes.setdefault(rollout, set()).add(causes.get(sequence, ""))
    rollouts_masked.update(min(found, key=MASK_CAUSES.index) for found in outcomes.values() if "" not in found)
    return TrainedCounts(
        stepped=any(stepped),
        rollouts_trained=len(prepared.rollout_tokens) - sum(rollouts_masked.values()),
        rollouts_masked=dict(rollouts_masked),
        tokens_trained=sum(prepared.rollout_tokens) - sum(tokens_masked.values()),
        tokens_masked=dict(tokens_masked),
    )


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
