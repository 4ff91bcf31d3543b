"""Simulated fleets of fast and slow generators around the real queue core, with and without the rule for slow ones.

Generators of 16 slots, 16 groups of 8 a step, log-normal answer lengths (sigma 1); a step trains as long as three of
speed 1 sample for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

from async_rl.config.loading import parse_config
from async_rl.extensions.insight.plan import simulation
from async_rl.extensions.insight.plan.lengths import Lengths
from async_rl.extensions.insight.plan.rates import Rates
from async_rl.extensions.insight.plan.simulated_generator import SimulatedGenerator
from async_rl.extensions.insight.plan.simulation import Prediction, Setting, simulate
from async_rl.queue.core.pace import Paces

LENGTHS = Lengths(500, 1.0)
DECODE_STEP_S, TRAIN_S = 0.01, 13.0


def at_speeds(speeds: Sequence[float]) -> Callable[[str, int, Callable[[int], float]], SimulatedGenerator]:
    """Return what makes the generators of a simulation, one of each speed."""
    left = iter(speeds)

    def at_its_speed(name: str, num_slots: int, step_s: Callable[[int], float]) -> SimulatedGenerator:
        speed = next(left)
        return SimulatedGenerator(name, num_slots, lambda num_running: step_s(num_running) / speed)

    return at_its_speed


def predict(on_stale: str, bound: int, speeds: Sequence[float], *, has_rule: bool = True) -> Prediction:
    """Return what a run comes to whose generators have these speeds, with the rule for slow ones or without."""
    config = parse_config(
        {
            "run": {"dir": "none"}, "model": {"path": "none"}, "data": {"train": "none.jsonl"},
            "queue": {"on_stale": on_stale, "filter_range": [], "max_bytes": 1 << 40},
            "sampling": {"group_size": 8, "max_new_tokens": 8192},
            "learner": {"groups_per_step": 16}, "generator": {"batch_size": 16},
        },
        "the simulated fleet",
    )  # fmt: skip
    rates = Rates(lengths=LENGTHS, decode_step_s=DECODE_STEP_S, train_s=TRAIN_S, transfer_s=0.2, pause_s=0.05)
    check = Paces.check if has_rule else lambda *_: ""
    with patch.object(simulation, "SimulatedGenerator", at_speeds(speeds)), patch.object(Paces, "check", check):
        return simulate(config, rates, Setting(bound, len(speeds), 1, LENGTHS), num_steps=100)
