"""What does ``queue.run_ahead = "auto"`` cost, and how young is the data with it? Each cell beside the bound alone.

Simulated time around the real queue core (``async_rl.extensions.insight.plan``), so the figures are the same on every
machine: 8 groups of 8 a step, answers of 1000 tokens in the mean, 128 slots in total unless the cell says otherwise. A
ratio is the time of the learner's step by that in which the generators sample its batch. With jitter, each learner
step, and each generator's decode steps for the time of a batch, take a log-normal factor longer. A generator is lost,
lengths triple (with the learner's step or without) and generators are added after half of the steps that count;
evaluations take half of the generators again and again. Figures are means over seeds; both runs of a seed draw the same
lengths. Speed is the share of the time in which the learner trains.

At the end it names the cells that miss a goal, and exits with 1 if there are any. Speed must be at least 0.98 of the
bound alone's, mean age at most 2 + 1.4 L / S versions (as the run measured them, in the mean of its steps), and not
above the bound alone's; 1 % is allowed there, since a lease that is given at another time changes all that follows. If
generators become the slower side for good, the bound alone still has a stock of old batches to train, and pace has not:
the verdict says how many batches that were, and what the speed is without them.

    python -m benchmarks.pace [--quick] [--only TEXT] [--seeds 3] [--picture FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.extensions.insight.plan.lengths import Lengths
from async_rl.extensions.insight.plan.rates import Rates
from async_rl.extensions.insight.plan.simulated_generator import SimulatedGenerator
from async_rl.extensions.insight.plan.simulation import Setting, Simulation
from async_rl.queue.core import generator_requests
from async_rl.queue.messages import TrainedCounts

Event = Literal["", "one lost", "lengths x 3", "lengths and steps x 3", "evaluations", "twice as many generators"]
EVENTS: tuple[Event, ...] = (
    "one lost",
    "lengths x 3",
    "lengths and steps x 3",
    "evaluations",
    "twice as many generators",
)
GROUPS, SIZE, SLOTS, MEAN_TOKENS, LIMIT, DECODE_STEP_S = 8, 8, 128, 1000, 8192, 0.02
NUM_STEPS = 200
EVAL_EVERY, EVAL_BATCHES = 25, 3
"""Half of the generators get no leases for the time of so many batches, every so many steps."""
_RECORDED = {22: 7, 23: 312, 24: 1025, 25: 233, 26: 2090, 27: 36, 28: 1329, 29: 17, 30: 6, 31: 7, 32: 4, 34: 8, 39: 9}
"""Tokens of 5,083 answers of a quickstart run on two cores (``log/rollouts``); 37 shorter ones are left out."""
RECORDED = Lengths.of_groups(tuple((n,) for n, count in _RECORDED.items() for _ in range(count))).with_mean(MEAN_TOKENS)
LENGTHS = {f"sigma {s}": Lengths(MEAN_TOKENS, s, LIMIT) for s in (0.5, 1.0, 1.5)} | {
    "recorded": replace(RECORDED, limit=LIMIT)
}
SPEED, AGE, AGE_SHARE = 0.98, 1.4, 0.01


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting. ``learner_jitter`` and ``generator_jitter`` are standard deviations of logarithms."""

    lengths: str = "sigma 1.0"
    ratio: float = 1.0
    bound: int = 16
    generators: int = 2
    slots: int = SLOTS
    filtered: float = 0.0
    learner_jitter: float = 0.0
    generator_jitter: float = 0.0
    event: Event = ""

    @property
    def name(self) -> str:
        parts = [f"{self.lengths}, {self.generators} x {self.slots // self.generators} slots"]
        parts += [f"filtered {self.filtered}"] * bool(self.filtered)
        has_jitter = self.learner_jitter + self.generator_jitter > 0
        parts += [f"jitter {self.learner_jitter} / {self.generator_jitter}"] * has_jitter
        return ", ".join([*parts, self.event] if self.event else parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to, or the mean of several."""

    speed: float  # share of the time in which the learner trains
    age: float
    late: float
    allowed_age: float
    slack: float
    spent: float  # batches that were queued at the beginning and no longer at the end


@dataclass(frozen=True, slots=True)
class JitteredRates(Rates):
    """Rates of a learner whose steps take a log-normal factor of 1 in the mean."""

    jitter: float = 0.0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def step_s(self, num_tokens: float, num_ranks: int) -> float:
        return Rates.step_s(self, num_tokens, num_ranks) * _factor(self.random, self.jitter)


class Run(Simulation):
    """A run in which something happens, besides."""

    def __init__(self, cell: Cell, run_ahead: str, seed: int) -> None:
        self._cell, self._random, lengths = cell, np.random.default_rng(seed), LENGTHS[cell.lengths]
        mean = float(lengths.draw(4000, SIZE, 0).mean())
        self._batch_s = GROUPS * SIZE * mean * DECODE_STEP_S / cell.slots / (1 - cell.filtered)
        train_s = self._batch_s * cell.ratio
        by_tokens = cell.event == "lengths and steps x 3"
        rates = JitteredRates(
            lengths=lengths, decode_step_s=DECODE_STEP_S, transfer_s=0.2, pause_s=0.05, filtered=cell.filtered,
            train_s=0.0 if by_tokens else train_s, train_token_s=train_s / (GROUPS * SIZE * mean) if by_tokens else 0.0,
            jitter=cell.learner_jitter, random=np.random.default_rng(seed + 1),
        )  # fmt: skip
        num_late = cell.generators if cell.event == "twice as many generators" else 0
        setting = Setting(cell.bound, cell.generators + num_late, 1, lengths)
        super().__init__(_config(cell, run_ahead, seed), rates, setting, NUM_STEPS)
        names = list(self._generators)
        self._late = {name: self._generators.pop(name) for name in names[len(names) - num_late :]}
        self._resting: set[str] = set()
        self._allowed, self._warm, self._stock = list[float](), self._warmup_steps, 0
        if cell.generator_jitter:
            self._at(0.0, self._jitter)

    def outcome(self) -> Outcome:
        found = self.run()
        late = found.dropped + found.masked
        slack, spent = self._state.run_ahead.slack, (self._stock - len(self._state.queued)) / GROUPS
        return Outcome(1 - found.idle_learner, found.staleness_mean, late, float(np.mean(self._allowed)), slack, spent)

    def _wanted(self, generator: SimulatedGenerator) -> int:
        return 0 if generator.name in self._resting else super()._wanted(generator)

    def _acknowledge(self, counts: TrainedCounts) -> None:
        super()._acknowledge(counts)
        pace = self._state.run_ahead
        if self._step == self._warm:
            self._stock = len(self._state.queued)
        elif self._step > self._warm:
            self._allowed.append(2 + AGE * pace.group_s / pace.step_s)
        if self._step == self._warm + self._num_steps // 2:
            self._change()
        if self._cell.event == "evaluations" and self._step % EVAL_EVERY == 0:
            half = list(self._generators)[: max(1, len(self._generators) // 2)]
            self._rest(half)
            self._at(self._now + EVAL_BATCHES * self._batch_s, self._wake, half)

    def _change(self) -> None:
        """What happens in the middle."""
        first = next(iter(self._generators.values()))
        if self._cell.event == "one lost":
            self._rest([first.name])
            first.change_pace(lambda _: 1e12, self._now)
            self._at(self._now + 120.0, self._time_out, first)  # the default of queue.lease_timeout_s
        elif self._cell.event.endswith("x 3"):
            self._lengths = [[3 * length for length in group] for group in self._lengths]
        for generator in self._late.values():
            self._generators[generator.name] = generator
            self._offer(generator)

    def _rest(self, names: Sequence[str]) -> None:
        self._resting.update(names)
        for version in list(self._asking):
            for name in names:
                generator = self._generators[name]
                if generator in self._asking[version]:
                    self._asking[version].remove(generator)
                    generator.is_asking = False
            if not self._asking[version]:
                del self._asking[version]

    def _wake(self, names: Sequence[str]) -> None:
        self._resting.difference_update(names)
        for name in names:
            self._go_on(self._generators[name])

    def _time_out(self, generator: SimulatedGenerator) -> None:
        generator_requests.goodbye(self._state, generator.name, self._now)
        generator.cancel(list(generator.groups), self._now)

    def _jitter(self) -> None:
        """Let each generator have another pace, until the time of a batch has passed."""
        for generator in self._generators.values():
            step_s = DECODE_STEP_S * _factor(self._random, self._cell.generator_jitter)
            generator.change_pace(lambda _, step_s=step_s: step_s, self._now)
            self._go_on(generator)
        self._at(self._now + self._batch_s, self._jitter)


def _factor(random: np.random.Generator, sigma: float) -> float:
    return float(np.exp(sigma * random.standard_normal() - sigma**2 / 2))


def _config(cell: Cell, run_ahead: str, seed: int) -> Config:
    return parse_config(
        {
            "run": {"dir": "none", "seed": seed}, "model": {"path": "none"}, "data": {"train": "none.jsonl"},
            "queue": {"max_staleness": cell.bound, "run_ahead": run_ahead, "max_bytes": 1 << 40},
            "sampling": {"group_size": SIZE, "max_new_tokens": 3 * LIMIT},
            "learner": {"groups_per_step": GROUPS, "steps": 100_000, "max_tokens": 1 << 20},
            "generator": {"batch_size": cell.slots // cell.generators},
        },
        "the benchmark's config",
    )  # fmt: skip


def cells() -> Iterator[Cell]:
    """All lengths, ratios and bounds with two generators, then each other axis at some ratios and bounds."""
    for lengths, ratio, bound in product(LENGTHS, (0.5, 0.8, 0.9, 1.0, 1.1, 1.3, 2.0, 3.0, 5.0, 8.0), (4, 16, 64)):
        yield Cell(lengths, ratio, bound)
    others = [Cell(generators=n) for n in (1, 4, 8, 16)]
    others += [Cell(slots=16), Cell(generators=16, slots=1024)]
    others += [Cell(filtered=share) for share in (0.2, 0.5)]
    others += [Cell(learner_jitter=a, generator_jitter=b) for a, b in ((0.3, 0.0), (0.0, 0.3), (0.5, 0.5))]
    others += [Cell(event=event) for event in EVENTS]
    for cell, ratio, bound in product(others, (0.8, 1.0, 1.3, 3.0), (4, 16)):
        yield replace(cell, ratio=ratio, bound=bound)


def run(job: tuple[Cell, str, int]) -> Outcome:
    return Run(*job).outcome()


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(*(float(np.mean([getattr(o, name) for o in outcomes])) for name in Outcome.__slots__))


def misses(bound: Outcome, paced: Outcome) -> list[str]:
    """Return the goals that a cell misses, in words."""
    found = list[str]()
    if (share := paced.speed / bound.speed) < SPEED:
        once = max(0.0, bound.spent - paced.spent)
        found.append(f"speed {share:.3f}, {share / (1 - once / NUM_STEPS):.3f} without {once:.1f} batches spent once")
    if paced.age > paced.allowed_age:
        found.append(f"age {paced.age:.2f} above {paced.allowed_age:.2f}")
    if paced.age > bound.age * (1 + AGE_SHARE):
        found.append(f"age {paced.age:.2f} above the bound alone's {bound.age:.2f}")
    return found


def draw(path: Path) -> None:
    """Draw the mean age over the bound, with pace and without, one panel for each ratio."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ratios, bounds, sides = (1.0, 1.3, 3.0), (1, 2, 4, 8, 16, 32, 64), ("bound", "auto")
    jobs = [(Cell(ratio=r, bound=b), side, 0) for r, side, b in product(ratios, sides, bounds)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        ages = np.array([outcome.age for outcome in pool.map(run, jobs)]).reshape(len(ratios), len(sides), -1)
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (axes, ratio) in enumerate(zip(figure.subplots(1, len(ratios), sharey=True), ratios, strict=True)):
        axes.plot(bounds, ages[panel, 0], "o--", color="#888888", label="the bound alone")
        axes.plot(bounds, ages[panel, 1], "s-", color="#0072b2", label='queue.run_ahead = "auto"')
        axes.set(xscale="log", yscale="log", xticks=bounds, yticks=bounds, xlabel="queue.max_staleness")
        axes.set(xticklabels=bounds, yticklabels=bounds, title=f"learner's step = {ratio:g} x sampling's")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if panel == 0:
            axes.set_ylabel("mean age, in versions")
            axes.legend(fontsize=9, edgecolor="none")
    figure.savefig(path, dpi=120, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="every seventh cell, one seed")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose name has this text")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="only draw the mean age over the bound")
    options = parser.parse_args()
    if options.picture:
        draw(options.picture)
        return
    chosen = [cell for cell in cells() if options.only in cell.name][:: 7 if options.quick else 1]
    seeds = range(1 if options.quick else options.seeds)
    jobs = [(cell, run_ahead, seed) for cell in chosen for run_ahead in ("bound", "auto") for seed in seeds]
    print(
        "| setting | ratio | bound | speed with pace | age alone | with pace | 2 + 1.4 L / S | late alone "
        "| with pace | q |"
    )
    print("|---" * 10 + "|", flush=True)
    verdict = list[str]()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(run, jobs, chunksize=1)
        for cell in chosen:
            alone, paced = (_mean([next(outcomes) for _ in seeds]) for _ in range(2))
            print(
                f"| {cell.name} | {cell.ratio:g} | {cell.bound} | {paced.speed / alone.speed:.3f} "
                f"| {alone.age:.2f} | {paced.age:.2f} | {paced.allowed_age:.2f} "
                f"| {alone.late:.1%} | {paced.late:.1%} | {paced.slack:.2f} |",
                flush=True,
            )
            if found := misses(alone, paced):
                verdict.append(f"{cell.name}, ratio {cell.ratio:g}, bound {cell.bound}: {'; '.join(found)}")
    print(f"\n{len(verdict)} of {len(chosen)} cells miss a goal" + "".join(f"\n- {line}" for line in verdict))
    sys.exit(bool(verdict))


if __name__ == "__main__":
    main()
