"""What the queue has received and lost, as parts of the step: bias from lost groups, and the accuracy of all answers.

``DropBias`` compares the groups that were kept in the last steps with all groups that ended, to show whether the lost
groups make the training data differ from what was sampled. Filtered groups count as kept, because the filter chooses on
purpose. A cancelled answer was never received in full. It counts with the length that its generator had reported, so
the true difference is larger.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from async_rl.config.config import Config
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.step_result import StepResult
from async_rl.queue.messages import Acked

logger = logging.getLogger(__name__)

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


class DropBias(StepPart):
    """Computes the ``bias/...`` metrics: how the groups kept in the last steps differ from all groups that ended."""

    def __init__(self) -> None:
        self._ledgers: deque[Mapping[str, Any]] = deque(maxlen=WINDOW_STEPS + 1)
        self._steps_to_silence = 0
        self._metrics: dict[str, float] = {}

    def acknowledged(self, acked: Acked) -> None:
        self._metrics = self.step(acked.stats.ledger)

    def record(self, result: StepResult) -> Mapping[str, float]:
        return self._metrics

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


class ReceivedAccuracy(StepPart):
    """Shows how accurate the answers are that the queue has received since the last step.

    Nothing at the first step, and if the order of the rows makes steps differ.
    """

    def __init__(self, config: Config) -> None:
        self._is_shown = config.data.shuffle and not config.data.curriculum.is_on
        self._ledger: Mapping[str, Any] | None = None
        self._accuracy: float | None = None

    def trained(self, result: StepResult) -> Mapping[str, float]:
        return {} if self._accuracy is None else {"accuracy/received": self._accuracy}

    def acknowledged(self, acked: Acked) -> None:
        before, self._ledger = self._ledger, acked.stats.ledger
        self._accuracy = received_accuracy(before, self._ledger) if before is not None and self._is_shown else None


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
