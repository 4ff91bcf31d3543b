"""How near is the learner to its limit? One optimizer step beside the limit and three other loops, ratios printed.

The batch is groups of 8 answers that share a prompt, of log-normal lengths. The *limit* computes the same rows with the
same attention and optimizer, and a plain cross-entropy in place of the loss and its statistics. ``learner_sides.py``
describes the sides. Each is a process of its own, so that its peak memory is its own. On the CPU the steps of all
sides alternate; on a GPU one process follows the other. Ratios are medians over rounds, and the first round of steps
does not count.

    python -m benchmarks.learner [--vocabularies 32000,151936] [--rounds 3]
    python -m benchmarks.learner --sides async-rl,compiled
    python -m benchmarks.learner --device cuda --shape qwen2.5-1.5b --length 8192 --dtype bfloat16

The side ``trl`` needs ``pip install -c constraints.txt -e ".[bench]"``. *MFU* is the share of the device's bfloat16
peak (``async_rl/learner/engine/flops.py``), for all sides by the operations that the step must compute: a shared prompt
once and no padding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import transformers

from async_rl.learner.data.packing import pack
from async_rl.learner.engine.flops import StepFlops, peak_flops_per_s
from benchmarks.learner_data import SHAPES, Task, num_trained, sequences_of, write_model

SIDES = ("async-rl", "limit", "packed", "padded", "trl")
QWEN_VOCABULARY = 151936
GOALS = {32000: 0.90, QWEN_VOCABULARY: 0.80}
"""Share of the limit's speed, by the vocabulary."""
GOAL_OVER_LOOPS = 2.0


class Side:
    """The process of one side."""

    def __init__(self, name: str, task: Task) -> None:
        command = [sys.executable, "-m", "benchmarks.learner_sides", name, task.to_json()]
        self._name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> dict[str, Any]:
        """Make a step and return what the process prints about it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("step", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name}: expected a step, but its process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(slots=True)
class Result:
    """The steps of one side. ``failed`` says why there are none."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    failed: str = ""

    def add(self, step: dict[str, Any]) -> None:
        self.failed = step.get("failed", "")
        if not self.failed:
            self.seconds.append(step["seconds"])
            self.peak_bytes = step["peak_bytes"]


def measure(task: Task, sides: Sequence[str], num_rounds: int) -> dict[str, Result]:
    """Make one step of each side that does not count, and ``num_rounds`` that do."""
    results = {name: Result() for name in sides}
    batches = [[name] for name in sides] if task.device == "cuda" else [list(sides)]
    for batch in batches:
        with ExitStack() as stack:
            processes = {name: Side(name, task) for name in batch}
            for process in processes.values():
                stack.callback(process.close)
            for _ in range(1 + num_rounds):
                for name, process in processes.items():
                    if not results[name].failed:
                        results[name].add(process.step())
    for result in results.values():
        del result.seconds[:1]
    return results


def ratio(results: dict[str, Result], side: str, over: str) -> float | None:
    """Return how many times as fast ``side`` is as ``over``, a median over rounds. None if one of them did not run."""
    if over not in results or side not in results or results[side].failed or results[over].failed:
        return None
    pairs = zip(results[side].seconds, results[over].seconds, strict=True)
    return median(slow / fast for fast, slow in pairs)


def table(task: Task, results: dict[str, Result], peak: float | None) -> None:
    """Print a line for each side, and how the goals are met."""
    sequences = sequences_of(task)
    (micro_batches,) = pack(sequences, max_tokens=task.max_tokens, num_ranks=1)
    with torch.device("meta"):
        costs = StepFlops.of_model(transformers.Qwen2ForCausalLM(task.model_config()))
    flops = sum(map(costs.of, micro_batches))
    num_row_tokens = sum(len(mb.token_ids) for mb in micro_batches)
    print(
        f"\n{task.shape}, vocabulary {task.vocab_size}, {task.dtype}: {len(sequences)} sequences of up to "
        f"{max(len(s.token_ids) for s in sequences)} tokens, {sum(len(s.token_ids) for s in sequences)} in all, "
        f"{num_trained(sequences)} trained, {num_row_tokens} in packed rows of at most {task.max_tokens}"
    )
    print("side        s/step  trained tokens/s  of the limit  TFLOP/s   MFU  peak GB")
    for name, result in results.items():
        if result.failed:
            print(f"{name:10}  {result.failed}")
            continue
        seconds = median(result.seconds)
        of_limit = ratio(results, name, "limit")
        print(
            f"{name:10}  {seconds:6.2f}  {num_trained(sequences) / seconds:16,.0f}  "
            f"{'' if of_limit is None else format(of_limit, '.2f'):>12}  {flops / seconds / 1e12:7.2f}  "
            f"{'' if peak is None else format(flops / seconds / peak, '.0%'):>4}  {result.peak_bytes / 1e9:7.2f}"
        )
    print_goals(task, results)


def print_goals(task: Task, results: dict[str, Result]) -> None:
    goals = {
        "limit": GOALS.get(task.vocab_size),
        "padded": GOAL_OVER_LOOPS,
        "trl": GOAL_OVER_LOOPS,
        "packed": None,
        "compiled": None,
    }
    for over, goal in goals.items():
        if (found := ratio(results, "async-rl", over)) is not None:
            wanted = "" if goal is None else f" (goal {goal:.2f}: {'met' if found >= goal else 'missed'})"
            print(f"async-rl over {over}: {found:.2f}x{wanted}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default=f"32000,{QWEN_VOCABULARY}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--groups", type=int, default=2, help="groups of 8 in a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest sequence")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the lengths; 0: all have --length tokens")
    parser.add_argument("--max-tokens", type=int, help="of a micro-batch; if unset, 1024 on the CPU and 16384 on a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of async-rl's side")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    default = 16384 if chosen.device == "cuda" else 1024
    sides: list[str] = chosen.sides.split(",")
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.processor() or platform.machine()
    print(
        f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {chosen.rounds} rounds"
    )
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(
            directory=scratch, shape=chosen.shape, vocab_size=0, num_groups=chosen.groups, length=chosen.length,
            sigma=chosen.sigma, max_tokens=chosen.max_tokens or max(default, chosen.length), device=chosen.device,
            dtype=chosen.dtype, gradient_checkpointing=chosen.gradient_checkpointing, settings=tuple(chosen.set),
        )  # fmt: skip
        peak = peak_flops_per_s(name, task.torch_dtype) if chosen.device == "cuda" else None
        for vocab_size in map(int, chosen.vocabularies.split(",")):
            task = replace(task, vocab_size=vocab_size)
            write_model(task)
            table(task, measure(task, sides, chosen.rounds), peak)


if __name__ == "__main__":
    main()
