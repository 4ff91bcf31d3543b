"""The adaptive staleness bound (``queue.adaptive``) as a part of the step.

After every step it reads the effective sample size, the KL and the age of the oldest token. The queue applies the new
bound (``queue/core/admission.py``). The bound rises by one and falls by half, as TCP's window does (Chiu and Jain
1989): samples that are too old hurt training now, while a bound that is too low only costs overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import BoundState, TrainerState
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.step_result import StepResult
from async_rl.learner.losses.diagnostics import summarise

logger = logging.getLogger(__name__)

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


class AdaptiveBound(StepPart):
    """Adapts the bound of new leases after each step. ``state.bound_state`` is its own, and is sent to the queue with
    the step's acknowledgement.
    """

    def __init__(self, config: Config, state: TrainerState) -> None:
        self._limits, self._state = BoundLimits.from_config(config), state

    def trained(self, result: StepResult) -> Mapping[str, float]:
        before = self._state.bound_state or BoundState(self._limits.highest)
        after = update_bound(before, reading_of(result.updates, oldest=result.staleness.max), self._limits)
        self._state.bound_state = after
        if after.bound != before.bound:
            step = self._state.step + 1
            logger.info("step %d: the staleness bound for new leases is %d, was %d", step, after.bound, before.bound)
        return {"staleness/bound": after.bound, "staleness/decision": after.bound - before.bound}


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
