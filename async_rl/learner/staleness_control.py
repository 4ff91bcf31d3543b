"""``queue.adaptive``: decide how old new samples may get, from what staleness did to the last step. Pure.

In: the effective sample size and KL of each step, and the age of its oldest token. Out: the staleness bound for new
leases. The trainer calls ``update_bound`` after every step, sends the bound with its ack (``queue/core/admission.py``
applies it) and keeps the state in its checkpoint.

The bound goes up by one and down by half, as TCP's window does (Chiu and Jain 1989): samples that are too old hurt
training now, while a bound that is too low only costs overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.config.config import Config
from async_rl.learner.engine.protocol import UpdateStats
from async_rl.learner.losses.diagnostics import summarise

OVERLOADED_STEPS = 2
"""Steps in a row past a limit before the bound is lowered: one odd batch is no trend."""
HEALTHY_STEPS = 10
"""Steps in a row far from both limits before the bound is raised. To wait costs a little overlap. To raise the bound
too soon costs an overloaded run some of its learning."""
HEALTHY_SHARE = 0.5
"""Far: at most this share of the way to each limit. The KL, and what is lost of the ESS, grow with the lag at most as
its square, so from a bound of 3 on, one version more takes them at most (4 / 3)^2 = 1.8 times as far, within limits."""


@dataclass(frozen=True, slots=True)
class BoundState:
    """The state between steps; it is part of the checkpoint.

    Attributes:
        bound: the staleness bound for new leases, in versions.
        streak: steps in a row with one verdict; healthy ones count up, overloaded ones down.
        settling: steps to come whose batches were leased before the last change, so they say nothing about it.
    """

    bound: int
    streak: int = 0
    settling: int = 0


@dataclass(frozen=True, slots=True)
class BoundLimits:
    """The range of the bound, and the limits of a step: ``experimental.adaptive_{min_ess,max_kl}``."""

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
    """One step: normalised ESS in (0, 1], k3 estimate of KL(mu || pi) in nats, age of its oldest token in versions."""

    ess: float
    kl: float
    oldest: int


def read(updates: Sequence[UpdateStats | None], *, oldest: int) -> Reading | None:
    """The worst values of a batch's optimizer steps, skipped ones included; None if nothing was measured."""
    measured = [update for update in updates if update is not None and len(update.by_lag)]
    if not measured:
        return None
    return Reading(min(u.ess for u in measured), max(summarise(u.by_lag.sum(0)).kl for u in measured), oldest)


def update_bound(state: BoundState, reading: Reading | None, limits: BoundLimits) -> BoundState:
    """The state after a step that showed ``reading``.

    After ``OVERLOADED_STEPS`` steps past a limit, the bound becomes half of itself or of the age that was seen,
    whichever is less. After ``HEALTHY_STEPS`` healthy steps it rises by one. After a change nothing is decided for as
    many steps as the old bound let generators sample ahead, because those steps show the old bound.
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
    # Without a change there is nothing to wait for, and the streak keeps its length.
    return BoundState(bound, settling=state.bound + 1) if bound != state.bound else state


def _verdict(reading: Reading, limits: BoundLimits) -> int:
    """-1 overloaded, 1 healthy, 0 neither. NaN is neither, since staleness does not cause it."""
    if reading.ess < limits.min_ess or reading.kl > limits.max_kl:
        # If samples are as young as they can be, a lower bound does not help.
        return -1 if reading.oldest > limits.lowest else 0
    is_healthy = 1 - reading.ess <= HEALTHY_SHARE * (1 - limits.min_ess) and reading.kl <= HEALTHY_SHARE * limits.max_kl
    return 1 if is_healthy else 0
