"""What becomes of answers that are too old: ``queue.on_stale`` drop, wait and mask, around the real buffer.

Simulated time (``simulated.py``), so the figures are the same on every machine: 4 generators of 16 slots, 32 groups of
8 a step, log-normal answer lengths (sigma 1), no filter. Three tables: generation and training *balanced*; generators
that could make twice what the learner takes (*generator-rich*); and *crowded*: balanced, with twice the slots, so that
an answer spans twice as many steps, and half of the variance in length the prompt's, which comes again with it. Columns
are explained in ``simulated.Outcome``. A minute or two.

    python -m benchmarks.on_stale [--steps 100] [--seed 0] [--wait-steps 0.5]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Mapping
from dataclasses import replace

from async_rl.config.queue import OnStale
from benchmarks.simulated import Outcome, Scenario, simulate

BOUNDS = (1, 4, 16)
MODES: tuple[OnStale, ...] = ("drop", "wait", "mask")
DEFAULT_BOUND = 4
TIE = 0.005
TABLES: Mapping[str, Scenario] = {
    "balanced": Scenario(max_staleness=0, on_stale="drop"),
    "generator-rich": Scenario(max_staleness=0, on_stale="drop", speed=2.0),
    "crowded": Scenario(max_staleness=0, on_stale="drop", max_running=32, prompt_share=0.5),
}
HEADER = """
bound  on_stale  steps/s  learner  groups   prompts    tokens  tokens  staleness   trained  trained  longest  bias/
                          waits    dropped  set aside  wasted  masked  mean   max  tokens   length   tenth    length"""


def table(name: str, base: Scenario) -> dict[tuple[int, OnStale], Outcome]:
    """Print one line a bound and mode."""
    slots, answer_steps = (
        base.num_generators * base.max_running,
        base.mean_tokens / max(base.sample_time, base.train_time),
    )
    print(
        f"\n{name}: generators make {base.speed:g}x what the learner trains; {slots} slots; {base.groups_per_step} "
        f"groups of {base.group_size} a step;\nan answer takes {answer_steps:.3g} steps on average; "
        f"{base.prompt_share:.0%} of the variance in length is the prompt's{HEADER}"
    )
    outcomes: dict[tuple[int, OnStale], Outcome] = {}
    for bound in BOUNDS:
        for mode in MODES:
            outcomes[bound, mode] = outcome = simulate(replace(base, max_staleness=bound, on_stale=mode))
            print(_line(bound, mode, outcome), flush=True)
    return outcomes


def _line(bound: int, mode: str, outcome: Outcome) -> str:
    o = outcome
    return (
        f"{bound:5d}  {mode:8s}  {o.pace:7.3f}  {o.wait:7.1%}  {o.dropped:7.1%}  {o.excluded:9.2%}  {o.wasted:6.1%}  "
        f"{o.masked:6.1%}  {o.staleness_mean:5.2f}  {o.staleness_max:4d}  {o.tokens:6.3f}  {o.length:7.3f}  "
        f"{o.long:7.1%}  {o.bias_length:6.3f}"
    )


def conclusion(outcomes: Mapping[str, Mapping[tuple[int, OnStale], Outcome]]) -> str:
    """What the modes leave at the default bound, as the trained tokens a second over all that could be."""
    lines = [f"\nAt a bound of {DEFAULT_BOUND}, trained tokens/s over what no loss and no wait would give:"]
    among_best = set(MODES)
    for name, by_mode in outcomes.items():
        useful = {mode: by_mode[DEFAULT_BOUND, mode].pace * by_mode[DEFAULT_BOUND, mode].tokens for mode in MODES}
        among_best &= {mode for mode in MODES if useful[mode] > max(useful.values()) - TIE}
        lines.append(f"  {name}: {', '.join(f'{mode} {value:.3f}' for mode, value in useful.items())}")
    lines.append(f"The most, or within {TIE:g} of it, in every table: {' and '.join(sorted(among_best)) or 'no mode'}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="queue.on_stale around the real buffer, in simulated time")
    parser.add_argument("--steps", type=int, default=100, help="that count, after the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wait-steps", type=float, default=0.5, help="queue.wait_s, in steps of full speed")
    arguments = parser.parse_args()
    started = time.monotonic()
    print(f"python {platform.python_version()}, seed {arguments.seed}, {arguments.steps} steps, ", end="")
    print(f"queue.wait_s = {arguments.wait_steps:g} steps, queue.max_attempts = 3")
    changes = {"steps": arguments.steps, "seed": arguments.seed, "wait_steps": arguments.wait_steps}
    outcomes = {name: table(name, replace(base, **changes)) for name, base in TABLES.items()}
    print(conclusion(outcomes))
    print(f"({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
