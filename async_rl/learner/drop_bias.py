"""Measure whether groups lost to staleness skew what is trained. Ledgers of the queue enter, metrics leave.

Groups kept in the last steps are compared with all groups that ended. Kept are trained and filtered ones, since the
filter chooses on purpose. A cancelled answer was never received in full: its length is what its generator had reported
by then, so the true skew is rather larger than the metrics.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

WINDOW_STEPS = 50
"""Metrics are over the last so many steps; there is at most one warning in that time."""
MIN_GROUPS = 100
"""With fewer ended groups there is no warning."""
MAX_LENGTH_SKEW = 0.05
MAX_ACCURACY_SKEW = 0.05


def drop_bias(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """The ``bias/...`` metrics of what ended between two ledgers (as in ``QueueStats``); none if nothing was kept."""
    ended = _sums(after)
    ended.subtract(_sums(before))
    if ended["kept/rollouts"] <= 0:
        return {}

    def mean(name: str, unit: str) -> float:
        return ended[f"{name}/{unit}"] / ended[f"{name}/rollouts"]

    length = mean("ended", "tokens")
    return {
        "bias/groups": ended["ended/groups"],
        "bias/lost": ended["lost/groups"] / ended["ended/groups"],
        "bias/length": mean("kept", "tokens") / length if length else 1.0,
        "bias/reward": mean("kept", "reward") - mean("judged", "reward"),
        "bias/accuracy": mean("kept", "accuracy") - mean("judged", "accuracy"),
    }


class DropBias:
    """The bias of the last steps, updated after every step. It covers one learner start."""

    def __init__(self) -> None:
        self._ledgers: deque[Mapping[str, Any]] = deque(maxlen=WINDOW_STEPS + 1)
        self._steps_to_silence = 0

    def step(self, ledger: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of the window that ends with ``ledger``; warns when they are far off.

        Returns:
            None of them at the first step of a start, or when nothing was kept.
        """
        self._ledgers.append(ledger)
        self._steps_to_silence -= 1
        metrics = drop_bias(self._ledgers[0], ledger)
        if self._steps_to_silence <= 0 and metrics and _is_skewed(metrics):
            self._steps_to_silence = WINDOW_STEPS
            _warn(metrics, len(self._ledgers) - 1)
        return metrics


def _sums(ledger: Mapping[str, Any]) -> Counter[str]:
    """Cumulative, by what ended: ``kept``, ``lost``, ``judged`` (has a reward) and ``ended`` (all)."""
    outcomes: Mapping[str, Mapping[str, float]] = ledger["outcomes"]
    sums: Counter[str] = Counter()
    for fate, names in (
        ("trained", ("kept", "judged", "ended")),
        ("filtered", ("kept", "judged", "ended")),
        ("dropped", ("lost", "judged", "ended")),
        ("cancelled", ("lost", "ended")),
    ):
        for name in names:
            for unit, amount in outcomes.get(fate, {}).items():
                sums[f"{name}/{unit}"] += amount  # type: ignore[assignment]
    # Tokens above the bound were sampled, and are lost though their group is trained.
    sums["kept/tokens"] -= ledger["tokens"]["masked"].get("stale", 0)
    return sums


def _is_skewed(metrics: Mapping[str, float]) -> bool:
    skewed = abs(metrics["bias/length"] - 1) > MAX_LENGTH_SKEW or abs(metrics["bias/accuracy"]) > MAX_ACCURACY_SKEW
    return skewed and metrics["bias/groups"] >= MIN_GROUPS


def _warn(metrics: Mapping[str, float], num_steps: int) -> None:
    logger.warning(
        "staleness skews what is trained: over the last %d steps %.0f%% of the groups were lost, and what was kept "
        "has %.2f times the tokens an answer of all that ended, its accuracy differs by %+.3f; raise "
        'queue.max_staleness, or set queue.on_stale = "wait"',
        num_steps,
        100 * metrics["bias/lost"],
        metrics["bias/length"],
        metrics["bias/accuracy"],
    )
