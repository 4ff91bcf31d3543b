"""Does asynchrony pay? Both sides in one run, ratios printed.

Part a replaces both engines' compute by timed waits, as on devices of their own: steps/s over ``1 / max(gen, train)``
and over the same run at ``max_staleness = 0``, for 1, 4 and 16 generators. Part b is real compute on this CPU: the
quickstart's steps/s beside a plain synchronous loop (1 and 2 threads) and beside TRL's GRPOTrainer, the same model,
prompts, reward and samples a step. Part c has the engines of part a, but one generator that is too slow: steps/s of a
learner that samples while it waits (``learner.generate``) over those of one that does not. Part d has them too, with
generators that are the faster side: age and steps/s with sampling paced (``queue.run_ahead``) beside the bound alone.

    python -m benchmarks.overlap [--part a|b|c|d] [--rounds 3] [--steps 40]

Part b needs the quickstart's warm start (``async-rl quickstart`` once) and ``pip install -e .[bench]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import transformers

from async_rl.run.records.step_log import read_rows
from benchmarks.timed import TimedResult, measure_timed

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.toml"
TASK = Path("runs/quickstart-task/seed-0")
RUN_DIR = Path("runs/benchmark")
MAX_STALENESS = 4
WARMUP_STEPS = 5


def timed_table(num_steps: int) -> None:
    """Part a: one line a number of generators."""
    print(f"\n(a) timed engines, balanced, log-normal lengths (sigma 1), max_staleness {MAX_STALENESS} beside 0")
    print("generators   gen s  train s  gen/train  async s/step  efficiency  staleness  stale  sync s/step  speed-up")
    for num_generators in (1, 4, 16):
        fast = measure_timed(num_generators=num_generators, max_staleness=MAX_STALENESS, steps=num_steps)
        slow = measure_timed(num_generators=num_generators, max_staleness=0, steps=num_steps)
        print(_timed_line(fast, slow), flush=True)


def _timed_line(fast: TimedResult, slow: TimedResult) -> str:
    return (
        f"{fast.num_generators:10d}  {fast.generate_s:6.3f}  {fast.train_s:7.3f}  {fast.balance:9.3f}  "
        f"{fast.step_s:12.3f}  {fast.efficiency:10.3f}  {fast.staleness_mean:9.2f}  {fast.dropped_share:5.1%}  "
        f"{slow.step_s:11.3f}  {slow.step_s / fast.step_s:8.2f}"
    )


def generating_table(num_steps: int) -> None:
    """Part c: one line for each shortage of generation."""
    print(f"\n(c) timed engines, one generator, its decode time a multiple of training, max_staleness {MAX_STALENESS}")
    print("multiple  waits s/step  learner idle  samples s/step  of the wait used  of the groups  staleness  speed-up")
    for shortage in (1.5, 2.0, 4.0):
        run = partial(measure_timed, num_generators=1, max_staleness=MAX_STALENESS, steps=num_steps, shortage=shortage)
        waits, samples = run(), run(generates=True)
        print(
            f"{shortage:8.1f}  {waits.step_s:12.3f}  {waits.learner_idle:12.1%}  {samples.step_s:14.3f}  "
            f"{samples.idle_used:16.1%}  {samples.learner_share:13.1%}  {samples.staleness_mean:9.2f}  "
            f"{waits.step_s / samples.step_s:8.2f}",
            flush=True,
        )


def paced_table(num_steps: int) -> None:
    """Part d: one line for each bound and share of the sampling's time in the training's."""
    print("\n(d) timed engines, two generators, sampling paced beside the bound alone")
    print("bound  gen/train  staleness  paced  late  paced  learner idle  paced  generators idle  paced  steps/s ratio")
    for bound in (4, 16):
        for shortage in (1.0, 0.77, 0.33):
            run = partial(
                measure_timed,
                num_generators=2,
                max_staleness=bound,
                steps=num_steps,
                shortage=shortage,
                warmup_steps=WARMUP_STEPS + bound,  # until the queue is full
            )
            alone, paced = run(), run(run_ahead="auto")
            print(
                f"{bound:5d}  {alone.balance:9.2f}  {alone.staleness_mean:9.2f}  {paced.staleness_mean:5.2f}  "
                f"{alone.dropped_share:4.1%}  {paced.dropped_share:5.1%}  {alone.learner_idle:12.1%}  "
                f"{paced.learner_idle:5.1%}  {alone.generators_idle:15.1%}  {paced.generators_idle:5.1%}  "
                f"{alone.step_s / paced.step_s:13.3f}",
                flush=True,
            )


def quickstart_settings(num_steps: int) -> list[str]:
    """The same for every side: no filter, for a filtered step costs each side another number of samples."""
    settings = {
        "model.path": TASK / "warm_start",
        "queue.filter_range": "[]",
        "learner.steps": num_steps,
        "optimizer.lr": 1e-4,
        "checkpoint.every": 0,
        "eval.every": 0,
        "log.rollouts_every": 0,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def run_async(num_steps: int) -> dict[str, Any]:
    """The product: launch, with everything that it starts on these cores."""
    command = [sys.executable, "-m", "async_rl", "launch", CONFIG, "--fresh", *quickstart_settings(num_steps)]
    subprocess.run([*command, "--set", f"run.dir={RUN_DIR}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = read_rows(ROOT / RUN_DIR / "metrics.jsonl")
    steps = [row for row in rows if "version" in row]
    evals = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
    window = steps[WARMUP_STEPS - 1 :]
    return {
        "steps_per_s": (len(window) - 1) / (window[-1]["time_s"] - window[0]["time_s"]),
        "accuracy_before": evals[0],
        "accuracy_after": evals[-1],
        "staleness": mean(row["staleness/mean"] for row in window),
    }


def run_peer(module: str, num_steps: int, num_threads: int) -> dict[str, Any]:
    """A peer's loop in a process of its own; its last line is its result."""
    command = [sys.executable, "-m", module, CONFIG, *quickstart_settings(num_steps), "--threads", str(num_threads)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def cpu_table(num_steps: int, rounds: int) -> None:
    """Part b: rounds of all sides in turn, medians, and the ratio to each peer round by round."""
    sides = {
        "async-rl": lambda: run_async(num_steps),
        "sync, 1 thread": lambda: run_peer("benchmarks.sync_loop", num_steps, 1),
        "sync, 2 threads": lambda: run_peer("benchmarks.sync_loop", num_steps, 2),
        "TRL, 1 thread": lambda: run_peer("benchmarks.trl_loop", num_steps, 1),
        "TRL, 2 threads": lambda: run_peer("benchmarks.trl_loop", num_steps, 2),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            results[name].append(run())
    print(f"\n(b) the quickstart on this CPU, {num_steps} steps, {rounds} rounds, medians")
    print("side             steps/s  accuracy before  after")
    for name, found in results.items():
        speed, before, after = (
            median(r[key] for r in found) for key in ("steps_per_s", "accuracy_before", "accuracy_after")
        )
        print(f"{name:15}  {speed:7.2f}  {before:15.3f}  {after:5.3f}")
    for peer in ("sync", "TRL"):
        ratios = [
            mine["steps_per_s"] / max(results[f"{peer}, {label}"][index]["steps_per_s"] for label in _THREADS)
            for index, mine in enumerate(results["async-rl"])
        ]
        print(f"async-rl over {peer} at its better thread count: " + ", ".join(f"{ratio:.2f}x" for ratio in ratios))
    print(f"async-rl's mean staleness: {median(r['staleness'] for r in results['async-rl']):.2f}")


_THREADS = ("1 thread", "2 threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("a", "b", "c", "d"), help="only this part")
    parser.add_argument("--rounds", type=int, default=3, help="of part b")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of parts a, c and d")
    parser.add_argument("--cpu-steps", type=int, default=80, help="steps of part b")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    if options.part in (None, "a"):
        timed_table(options.steps)
    if options.part in (None, "c"):
        generating_table(options.steps)
    if options.part in (None, "d"):
        paced_table(options.steps)
    if options.part in (None, "b"):
        cpu_table(options.cpu_steps, options.rounds)


if __name__ == "__main__":
    main()
