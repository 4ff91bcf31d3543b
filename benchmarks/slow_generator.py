"""What a slow generator costs a run, with and without the rule that gives it no leases (``queue.core.pace``).

Simulated time around the real queue core (``async_rl.plan``), so the figures are the same on every machine: three
generators of 16 slots and one that is ``--slower`` times as slow, 16 groups of 8 a step, log-normal answer lengths
(sigma 1); a step trains as long as the three sample for it. Columns are steps/s in units of what the learner could do,
and the share of tokens or groups that were masked or dropped for their age. A minute or two.

    python -m benchmarks.slow_generator [--slower 8]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from unittest.mock import patch

from async_rl.config.loading import parse_config
from async_rl.plan import simulation
from async_rl.plan.lengths import Lengths
from async_rl.plan.rates import Rates
from async_rl.plan.simulated_generator import SimulatedGenerator
from async_rl.plan.simulation import Prediction, Setting, simulate
from async_rl.queue.core.pace import Paces

LENGTHS = Lengths(500, 1.0)
DECODE_STEP_S, TRAIN_S = 0.01, 13.0
MODES, BOUNDS = ("mask", "drop", "wait"), (0, 1, 2, 4, 8)


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
        "the benchmark's config",
    )  # fmt: skip
    rates = Rates(lengths=LENGTHS, decode_step_s=DECODE_STEP_S, train_s=TRAIN_S, transfer_s=0.2, pause_s=0.05)
    check = Paces.check if has_rule else lambda *_: ""
    with patch.object(simulation, "SimulatedGenerator", at_speeds(speeds)), patch.object(Paces, "check", check):
        return simulate(config, rates, Setting(bound, len(speeds), 1, LENGTHS), num_steps=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slower", type=float, default=8.0)
    options = parser.parse_args()
    fast = [1.0, 1.0, 1.0]
    print(f"steps/s (share too old): three generators; and one {options.slower:g} times slower; the same, without rule")
    for on_stale in MODES:
        for bound in BOUNDS:
            beside = [*fast, 1 / options.slower]
            found = (
                predict(on_stale, bound, fast),
                predict(on_stale, bound, beside),
                predict(on_stale, bound, beside, has_rule=False),
            )
            cells = [f"{p.steps_per_s * TRAIN_S:.3f} ({p.masked + p.dropped:4.0%})" for p in found]
            print(f"{on_stale:5s} {bound:2d}  {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
