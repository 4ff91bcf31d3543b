"""How many short programs a second the sandbox grades, beside a bare ``subprocess.run`` of the same programs.

    python -m benchmarks.rewards [--programs 100] [--rounds 5] [--workers 2]

The programs are right answers to rows of MBPP with one of their tests each, run the way a model's answers are: through
``LocalJudge``, in the sandbox, output compared. The bare side starts ``python -S -c PROGRAM`` for each, with as many
threads, no isolation, and no comparison; ``-S`` leaves out the site packages, which its programs don't need, and makes
it faster. Rounds alternate between both sides; the table gives each round, the ratio is that of the medians. The CPU
time of a program, all processes of its side counted, says what cores that do nothing else would reach.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from async_rl.config.reward import CodeRewardConfig
from async_rl.data.dataset import RowRules, load_rows
from async_rl.rewards.code import local_judge
from async_rl.rewards.code_tests import CodeTests, parse_tests
from tests.rewards.code_answers import MBPP

ROWS = Path(__file__).resolve().parents[1] / "tests" / "data" / "mbpp_10.jsonl"
WANTED_PER_S, WANTED_RATIO = 50.0, 0.5

Task = tuple[str, CodeTests]


def tasks(num_programs: int) -> list[Task]:
    """``num_programs`` pairs of a right program and one test of its row."""
    found: list[Task] = []
    for problem, answers in zip(load_rows(str(ROWS), rules=RowRules(needs=("test_cases",))).rows, MBPP, strict=True):
        if answers is not None:
            tests = parse_tests(problem.reward_data).tests
            found += [(answers[0], CodeTests((test,), None)) for test in tests]
    return list(islice(cycle(found), num_programs))


class Measured(NamedTuple):
    """``rate`` in programs a second; ``cpu_s`` of one program, all processes counted."""

    rate: float
    cpu_s: float


def measure(run: Callable[[Task], bool], work: list[Task], workers: int) -> Measured:
    """Every program must be right."""
    started_s, started_cpu_s = time.perf_counter(), cpu_s()
    with ThreadPoolExecutor(workers) as pool:
        right = list(pool.map(run, work))
    elapsed_s = time.perf_counter() - started_s
    assert all(right), f"{right.count(False)} of {len(right)} programs failed"
    return Measured(len(work) / elapsed_s, (cpu_s() - started_cpu_s) / len(work))


def cpu_s() -> float:
    """Of this process, of those it waited for, and of the launcher's inner process and all that it waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for pid in descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
    return total


def descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def bare(task: Task) -> bool:
    source, tests = task
    test = tests.tests[0]
    done = subprocess.run([sys.executable, "-S", "-c", source], input=test.given, capture_output=True, text=True)
    return done.stdout == test.expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="in each round of each side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="programs at a time, on both sides")
    arguments = parser.parse_args()
    work = tasks(arguments.programs)
    judge = local_judge(CodeRewardConfig(time_limit_s=30.0, workers=arguments.workers))
    with closing(judge):

        def sandboxed(task: Task) -> bool:
            return judge.judge(*task).all_passed

        for side in (sandboxed, bare):
            measure(side, work[:10], arguments.workers)  # warms files and caches
        print(f"{arguments.programs} programs a round, {arguments.workers} at a time\n")
        print("round    sandbox/s   bare/s   ratio   sandbox CPU ms   bare CPU ms")
        found: list[tuple[Measured, Measured]] = []
        for number in range(arguments.rounds):
            order = (sandboxed, bare) if number % 2 == 0 else (bare, sandboxed)
            measured = {side: measure(side, work, arguments.workers) for side in order}
            found.append((measured[sandboxed], measured[bare]))
            print(row(str(number + 1), *found[-1]))
    ours, theirs = (Measured(*map(statistics.median, zip(*side))) for side in zip(*found))
    print(row("median", ours, theirs))
    print(f"wanted   {WANTED_PER_S:>9.1f}            {WANTED_RATIO:>5.2f}")


def row(name: str, ours: Measured, theirs: Measured) -> str:
    rates = f"{ours.rate:>9.1f}   {theirs.rate:>6.1f}   {ours.rate / theirs.rate:>5.2f}"
    return f"{name:<6}   {rates}   {ours.cpu_s * 1000:>14.1f}   {theirs.cpu_s * 1000:>11.1f}"


if __name__ == "__main__":
    main()
