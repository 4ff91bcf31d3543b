"""Staleness in a run: the age of trained tokens, the bias from lost groups, and the adaptive staleness bound.

- ``check_staleness`` and ``staleness_summary`` are about the tokens of one batch.
- ``DropBias`` compares the groups that were kept in the last steps with all groups that ended, to show whether the
  lost groups make the training data differ from what was sampled. Filtered groups count as kept, because the filter
  chooses on purpose. A cancelled answer was never received in full. It counts with the length that its generator had
  reported, so the true difference is larger.
- ``update_bound`` implements ``queue.adaptive``. After every step the trainer gives it the effective sample size, the
  KL and the age of the oldest token. It sends the new bound to the queue, which applies it
  (``queue/core/admission.py``). The bound rises by one and falls by half, as TCP's window does (Chiu and Jain 1989):
  samples that are too old hurt training now, while a bound that is too low only costs overlap.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.errors import StaleRolloutError
from async_rl.learner.checkpoints.files import BoundState
from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.interface import UpdateStats
from async_rl.learner.losses.diagnostics import summarise

logger = logging.getLogger(__name__)


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
    num_epochs = len(versions) // max(1, len(prepared.updates))
    for sequences, version in zip(prepared.updates * num_epochs, versions, strict=True):
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


WINDOW_STEPS = 50
"""The bias metrics cover this many of the last steps, and a warning is given at most once in that time."""
MIN_GROUPS = 100
"""Smallest number of ended groups for a warning."""
MAX_LENGTH_SKEW = 0.05
MAX_ACCURACY_SKEW = 0.05

_COUNTS_IN = {
    "trained": ("kept", "judged", "ended"),
    "filtered": ("kept", "judged", "ended"),
    "dropped": ("lost", "judged", "ended"),
    "cancelled": ("lost", "ended"),
}
"""Outcome of a group in the ledger -> the sums it counts in; ``judged`` groups have a reward."""


class DropBias:
    """Computes the ``bias/...`` metrics: how the groups kept in the last steps differ from all groups that ended."""

    def __init__(self) -> None:
        self._ledgers: deque[Mapping[str, Any]] = deque(maxlen=WINDOW_STEPS + 1)
        self._steps_to_silence = 0

    def step(self, ledger: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of the last steps. Log a warning if the kept groups differ too much from all groups.

        ``ledger`` is the queue's ledger after the step. There are no metrics at the first step of a start, or if no
        group was kept.
        """
        self._ledgers.append(ledger)
        self._steps_to_silence -= 1
        metrics = drop_bias(self._ledgers[0], ledger)
        if self._steps_to_silence <= 0 and metrics and _is_skewed(metrics):
            self._steps_to_silence = WINDOW_STEPS
            logger.warning(
                "staleness biases the trained groups: in the last %d steps %.0f%% of the groups were lost. An answer "
                "of a kept group has on average %.2f times the tokens of an answer of any group, and an accuracy that "
                'differs by %+.3f. In the next run, raise queue.max_staleness, or set queue.on_stale = "wait"',
                len(self._ledgers) - 1, 100 * metrics["bias/lost"], metrics["bias/length"], metrics["bias/accuracy"],
            )  # fmt: skip
        return metrics


def drop_bias(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return the ``bias/...`` metrics of the groups that ended between two states of the queue's ledger
    (``QueueStats``).

    Empty if no group was kept.
    """
    first, last = _sums(before), _sums(after)
    sums = {key: value - first.get(key, 0.0) for key, value in last.items()}
    if sums.get("kept/rollouts", 0.0) <= 0:
        return {}

    def mean(name: str, unit: str) -> float:
        return sums[f"{name}/{unit}"] / sums[f"{name}/rollouts"]

    length = mean("ended", "tokens")
    return {
        "bias/groups": sums["ended/groups"],
        "bias/lost": sums.get("lost/groups", 0.0) / sums["ended/groups"],
        "bias/length": mean("kept", "tokens") / length if length else 1.0,
        "bias/reward": mean("kept", "reward") - mean("judged", "reward"),
        "bias/accuracy": mean("kept", "accuracy") - mean("judged", "accuracy"),
    }


def received_accuracy(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Return the mean accuracy of the answers that were graded and ended between two states of the queue's ledger.

    None if there were none.
    """
    first, last = _sums(before), _sums(after)
    number = last.get("judged/rollouts", 0.0) - first.get("judged/rollouts", 0.0)
    if number <= 0:
        return None
    return (last["judged/accuracy"] - first.get("judged/accuracy", 0.0)) / number


def _sums(ledger: Mapping[str, Any]) -> dict[str, float]:
    """Return sums since the run began, by ``NAME/UNIT``, where NAME is one of those in ``_COUNTS_IN``."""
    sums: defaultdict[str, float] = defaultdict(float)
    for outcome, names in _COUNTS_IN.items():
        for unit, amount in ledger["outcomes"].get(outcome, {}).items():
            for name in names:
                sums[f"{name}/{unit}"] += amount
    # Tokens above the bound were sampled, and are lost though their group is trained.
    sums["kept/tokens"] -= ledger["tokens"]["masked"].get("stale", 0)
    return sums


def _is_skewed(metrics: Mapping[str, float]) -> bool:
    skewed = abs(metrics["bias/length"] - 1) > MAX_LENGTH_SKEW or abs(metrics["bias/accuracy"]) > MAX_ACCURACY_SKEW
    return skewed and metrics["bias/groups"] >= MIN_GROUPS


OVERLOADED_STEPS = 2
"""Steps in a row past a limit before the bound is lowered, because one odd batch is no trend."""
HEALTHY_STEPS = 10
"""Steps in a row far from both limits before the bound is raised. Waiting costs a little overlap; a bound that is
raised too soon costs an overloaded run some of its learning."""
HEALTHY_SHARE = 0.5
"""A step is far from a limit if it is at most this share of the way to it. The KL and the loss of ESS grow at most with
the square of the lag. From a bound of 3 on, one more version takes them at most (4 / 3)^2 = 1.8 times as far, which is
within the limits."""


@dataclass(frozen=True, slots=True)
class BoundLimits:
    """The range of the adaptive bound, and the limits of a healthy step.

    Attributes:
        lowest: the lowest bound, in versions.
        highest: the highest bound, in versions.
        min_ess: the value of ``experimental.adaptive_min_ess``.
        max_kl: the value of ``experimental.adaptive_max_kl``.
    """

    lowest: int
    highest: int
    min_ess: float
    max_kl: float

    @classmethod
    def from_config(cls, config: Config) -> BoundLimits:
        limits = config.experimental
        return cls(config.lowest_bound, config.queue.max_staleness, limits.adaptive_min_ess, limits.adaptive_max_kl)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one step measured, from which the adaptive bound is computed.

    Attributes:
        ess: normalised effective sample size, in (0, 1].
        kl: k3 estimate of KL(mu || pi), nats.
        oldest: age of the step's oldest token, in versions.
    """

    ess: float
    kl: float
    oldest: int


def reading_of(updates: Sequence[UpdateStats | None], *, oldest: int) -> Reading | None:
    """Return the worst values of a batch's optimizer steps, skipped ones included. None if nothing was measured.

    ``oldest`` is the age of the batch's oldest token.
    """
    measured = [update for update in updates if update is not None and len(update.by_lag)]
    if not measured:
        return None
    return Reading(min(u.ess for u in measured), max(summarise(u.by_lag.sum(0)).kl for u in measured), oldest)


def update_bound(state: BoundState, reading: Reading | None, limits: BoundLimits) -> BoundState:
    """Return the adaptive bound after a step that measured ``reading``.

    After ``OVERLOADED_STEPS`` steps past a limit, the bound becomes half of itself or half of the measured age,
    whichever is less. After ``HEALTHY_STEPS`` healthy steps it rises by one. After a change it stays for as many steps
    as the old bound let generators sample ahead, because those steps still show the old bound.
    """
    if state.settling:
        return replace(state, streak=0, settling=state.settling - 1)
    verdict = 0 if reading is None else _verdict(reading, limits)
    if reading is None or verdict == 0:
        return replace(state, streak=0)
    streak = state.streak + verdict if state.streak * verdict >= 0 else verdict
    if streak <= -OVERLOADED_STEPS:
        bound = max(limits.lowest, min(state.bound, reading.oldest) // 2)
    elif streak >= HEALTHY_STEPS:
        bound = min(limits.highest, state.bound + 1)
    else:
        return replace(state, streak=streak)
    # If the bound has not changed, no step is ignored, and the streak keeps its length.
    return BoundState(bound, settling=state.bound + 1) if bound != state.bound else state


def _verdict(reading: Reading, limits: BoundLimits) -> int:
    """Return -1 for an overloaded step, 1 for a healthy one, otherwise 0. NaN gives 0, because staleness is not
    its cause.
    """
    if reading.ess < limits.min_ess or reading.kl > limits.max_kl:
        # If samples are as young as they can be, a lower bound does not help.
        return -1 if reading.oldest > limits.lowest else 0
    is_healthy = 1 - reading.ess <= HEALTHY_SHARE * (1 - limits.min_ess) and reading.kl <= HEALTHY_SHARE * limits.max_kl
    return 1 if is_healthy else 0
