"""Is ``async-rl plan`` right? Real runs of a fixed grid of settings, and what plan predicts for them.

The queue server and the generators are processes, weights travel, leases are admitted. Only compute is replaced by
waits, as on devices of their own: the fake backend waits for each decode step, the timed engine for each update. The
first setting is the base: from the rates measured in its run plan predicts all settings; what differs by design (the
time of an update, the form of the lengths) is given.

    python -m benchmarks.plan [--only NAME ...] [--steps 24]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.config.queue import OnStale
from async_rl.learner.loop.start import LearnerContext, train_with
from async_rl.plan.lengths import Lengths
from async_rl.plan.rates import Rates, measure
from async_rl.plan.simulation import Prediction, Setting, simulate
from async_rl.run.directory import RunDir
from benchmarks.timed import TimedEngine

GROUPS_PER_STEP, GROUP_SIZE, SLOTS = 8, 4, 16
MEAN_TOKENS, DECODE_STEP_S = 12.0, 0.04
"""8 x 4 answers of 12 tokens take a generator with 16 slots 0.96 s, if all slots are always busy."""
WARMUP_STEPS = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of the grid. ``train_s`` is the time of an update."""

    name: str
    bound: int
    generators: int
    sigma: float = 0.8
    train_s: float = 0.5
    on_stale: OnStale = "mask"


GRID = (
    Case("base", 2, 2),
    Case("on-policy", 0, 2),
    Case("bound 1", 1, 2),
    Case("bound 4", 4, 2),
    Case("one generator, on-policy", 0, 1),
    Case("one generator", 2, 1),
    Case("four generators, on-policy", 0, 4),
    Case("four generators", 4, 4),
    Case("slow learner, on-policy", 0, 2, train_s=1.0),
    Case("slow learner", 2, 2, train_s=1.0),
    Case("equal lengths", 1, 2, sigma=0.0),
    Case("long tail, drop", 2, 2, sigma=1.2, on_stale="drop"),
)
"""Fixed before the first measurement of it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, over the steps after the first ones."""

    steps_per_s: float
    idle_learner: float
    staleness: float
    masked: float
    rates: Rates


def config_of(case: Case, directory: Path, num_steps: int) -> Config:
    """Return the config of a case's run, below ``directory``."""
    data, model, path = directory / "train.jsonl", directory / "model", directory / "config.toml"
    rows = ({"messages": [{"role": "user", "content": f"{i}"}], "gt_answer": str(i)} for i in range(4096))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model.mkdir()  # of no size: nobody loads it
    (model / "config.json").write_text("{}")
    config: dict[str, Any] = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": str(model)},
        "data": {"train": str(data), "system_prompt": ""},
        "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": 1024, "max_prompt_tokens": 64},
        "reward": {"soft_overlong": False},
        "queue": {"max_staleness": case.bound, "filter_range": [], "on_stale": case.on_stale},
        "loss": {"mask_truncated": False},
        "learner": {"steps": num_steps, "groups_per_step": GROUPS_PER_STEP},
        "generator": {"backend": "fake", "batch_size": SLOTS, "count": case.generators},
        "experimental": {"fake": {"mean_tokens": MEAN_TOKENS, "sigma": case.sigma, "step_time_s": DECODE_STEP_S}},
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "log": {"rollouts_every": 1000},
    }
    path.write_text(tomli_w.dumps(config))
    return load_config(path)


def run_case(case: Case, num_steps: int) -> Measured:
    """Make a case's run."""
    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(case, Path(scratch), WARMUP_STEPS + num_steps + case.bound + 1)
        generators: list[subprocess.Popen[bytes]] = []

        def start_generators(address: str) -> None:
            command = [sys.executable, "-m", "async_rl", "generator", "--connect", address]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            generators.extend(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
                for _ in range(case.generators)
            )

        try:
            rows = train_with(config, TimedEngine(case.train_s), LearnerContext(on_queue=start_generators))
        finally:
            for process in generators:
                process.send_signal(signal.SIGTERM)
            for process in generators:
                process.wait(30)
        rates = measure(RunDir(Path(config.run.dir)))
    # The last steps run dry, because no lease goes past the last one.
    window = [row for row in rows if "version" in row][WARMUP_STEPS : WARMUP_STEPS + num_steps]
    tokens = sum(row["tokens/trained"] + row["tokens/masked"] for row in window)
    return Measured(
        steps_per_s=len(window) / sum(row["time/step_s"] for row in window),
        idle_learner=sum(row["time/wait_s"] for row in window) / sum(row["time/step_s"] for row in window),
        staleness=mean(row["staleness/mean"] for row in window),
        masked=sum(row["tokens/masked"] for row in window) / tokens,
        rates=rates,
    )


def predict_case(case: Case, base: Rates) -> Prediction:
    """Predict a case from the rates of the base's run."""
    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(case, Path(scratch), 1)
    rates, lengths = base, base.lengths
    if case.train_s != GRID[0].train_s:
        rates = replace(rates, train_s=rates.train_s + case.train_s - GRID[0].train_s)
    if case.sigma != GRID[0].sigma:
        lengths = Lengths(MEAN_TOKENS, case.sigma)
    return simulate(config, rates, Setting(case.bound, case.generators, 1, lengths))


def line(case: Case, predicted: Prediction, measured: Measured) -> str:
    """Return a row of the table, in Markdown."""
    error = predicted.steps_per_s / measured.steps_per_s - 1
    return (
        f"| {case.name} | {case.bound} | {case.generators} | {predicted.steps_per_s:.3f} | {measured.steps_per_s:.3f} "
        f"| {error:+.0%} | {predicted.idle_learner:.0%} / {measured.idle_learner:.0%} | "
        f"{predicted.staleness_mean:.2f} / {measured.staleness:.2f} | "
        f"{predicted.masked:.1%} / {measured.masked:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="only these settings, besides the base")
    parser.add_argument("--steps", type=int, default=24, help="measured steps of each run")
    options = parser.parse_args()
    base: Rates | None = None
    print("| setting | bound | generators | predicted steps/s | measured | error | learner idle | staleness | masked |")
    print("|---" * 9 + "|", flush=True)
    for case in GRID:
        if base is not None and options.only is not None and case.name not in options.only:
            continue
        measured = run_case(case, options.steps)
        if base is None:
            base = measured.rates
        print(line(case, predict_case(case, base), measured), flush=True)
    assert base is not None
    print(
        f"\nrates of the base: {base.decode_step_s:.4f} s for a decode step and "
        f"{base.decode_sequence_s:.5f} s more for each of its sequences, {base.train_s:.3f} s and "
        f"{1e6 * base.train_token_s:.1f} s per million tokens for an update, {base.after_s:.3f} s after it, "
        f"{base.transfer_s:.3f} s until a version arrives, {base.pause_s:.4f} s of pause"
    )


if __name__ == "__main__":
    main()
