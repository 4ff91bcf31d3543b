"""Staleness of one batch: the age of its tokens, in versions of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.errors import StaleRolloutError
from async_rl.learner.data.batch import PreparedBatch


def check_staleness(prepared: PreparedBatch, *, version: int, max_staleness: int) -> None:
    """Check that no trained token is above the staleness bound. ``version`` is the last version that trains on the
    batch.

    Raises:
        StaleRolloutError: a token is above the bound. The queue never hands over such a token, so this is a bug of
            ours.
    """
    sequences = [s for s in prepared.sequences if prepared.sequence_tokens[s.sequence_id]]
    if not sequences:
        return
    oldest = int(np.concatenate([s.versions[s.loss_mask] for s in sequences]).min())
    if version - oldest > max_staleness:
        raise StaleRolloutError(
            f"expected tokens that are at most {max_staleness} versions old (queue.max_staleness), got one that is "
            f"{version - oldest} versions old (sampled at {oldest}, learner at {version}); this is a bug in async-rl, "
            f"please report it"
        )


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """Staleness of the trained tokens, in versions.

    Attributes:
        mean: mean over tokens.
        max: that of the oldest token.
        in_flight_mean: the part of the mean until the groups arrived at the queue.
        in_queue_mean: the part of the mean after that.
    """

    mean: float = 0.0
    max: int = 0
    in_flight_mean: float = 0.0
    in_queue_mean: float = 0.0


def staleness_summary(prepared: PreparedBatch, *, versions: Sequence[int]) -> StalenessSummary:
    """Return the staleness of the batch's trained tokens, which count once in every epoch.

    ``versions`` has the learner's version before each optimizer step, epoch after epoch.
    """
    ages, waits = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    num_epochs = len(versions) // max(1, len(prepared.mini_batches))
    for sequences, version in zip(prepared.mini_batches * num_epochs, versions, strict=True):
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
