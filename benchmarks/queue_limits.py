"""Where one queue server ends: many connected generators, joins and leaves, saturation, memory, and a restart.

The server is ``async-rl queue`` with its journal. The learner uses the real client and trains nothing; generators speak
the real protocol and sample nothing (``queue_limits_load``). A group has 2 rollouts of 2 tokens, about 500 bytes.

    python -m benchmarks.queue_limits --steady [--generators 1000] [--seconds 600] [--group-s 10] [--churn 10]
    python -m benchmarks.queue_limits --saturate [--generators 1000] [--seconds 15]
    python -m benchmarks.queue_limits --waiting [--generators 1000] [--seconds 15]
    python -m benchmarks.queue_limits --memory [--generators 1000]
    python -m benchmarks.queue_limits --restart [--groups 100000]

``--steady`` fails if a lease got lost: all that the queue granted must be trained, or dropped under a cause. Requests/s
and latencies are those that the generators see, and contain the time that a load process takes to read a reply.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tomli_w

from async_rl.queue.client.clients import LearnerQueue
from async_rl.run.queue_files import read_record
from benchmarks.queue_limits_load import GROUP_SIZE, RUN_ID, Report, run_fleet, run_learner
from benchmarks.queue_measure import Processes, cpu_seconds, processes, receive

_START_S = 60.0
_NUM_ROWS = 4096
_REMEMBERED = 66_000
"""The server keeps the ends of the last 65,536 leases. Its memory can be flat only once it has so many."""


@dataclass(frozen=True, slots=True)
class Options:
    """``processes``: of the load. ``group_s``: seconds that a generator takes for a group, one at a time."""

    directory: Path
    generators: int = 1000
    processes: int = 2
    seconds: float = 600.0
    group_s: float = 10.0
    churn: float = 10.0
    groups: int = 100_000
    warm_up_leases: int = _REMEMBERED


# The server.


def write_config(directory: Path, *, groups_per_step: int, max_staleness: int) -> Path:
    rows = (
        {"messages": [{"role": "user", "content": f"{i} + {i}"}], "gt_answer": str(2 * i)} for i in range(_NUM_ROWS)
    )
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": "none"},
        "data": {"train": str(directory / "train.jsonl"), "system_prompt": ""},
        "sampling": {"group_size": GROUP_SIZE, "max_prompt_tokens": 4, "max_new_tokens": 2},
        "reward": {"cache_length": 1},
        "queue": {"max_staleness": max_staleness, "run_ahead": "bound", "lease_timeout_s": 60.0, "max_bytes": 16 << 30},
        "learner": {"groups_per_step": groups_per_step, "steps": 10_000_000},
    }
    path = directory / "config.toml"
    path.write_text(tomli_w.dumps(config))
    return path


class Server:
    """``async-rl queue CONFIG``, started as users start it."""

    def __init__(self, config: Path) -> None:
        self._config, self._log = config, config.parent / "server.log"
        self.start()

    def start(self) -> None:
        """Start it, and return when it has written its address."""
        with self._log.open("ab") as output:
            command = [sys.executable, "-m", "async_rl", "queue", str(self._config), "--run-id", RUN_ID]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + _START_S
        while (record := read_record(self._config.parent / "run")) is None or record.pid != self.process.pid:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the queue server did not start:\n{self._log.read_text(errors='replace')}")
            time.sleep(0.01)
        self.address = record.address

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_START_S)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def run_dir(self) -> Path:
        return self._config.parent / "run"

    @property
    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    @property
    def cpu_s(self) -> tuple[float, float, float]:
        """Processor seconds of all its threads and of its loop's, and seconds for which the loop waited for one."""
        pid = self.process.pid
        used_ns, waited_ns, _ = map(int, Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split())
        return cpu_seconds(pid), used_ns / 1e9, waited_ns / 1e9


# The load.


class Load:
    """The processes that are generators, and the learner's."""

    def __init__(self, started: Processes, server: Server, options: Options) -> None:
        self._started, self._server, self._options = started, server, options
        most = -(-options.generators // options.processes)
        self._fleets = [
            started.start(run_fleet, server.address, process, most)[1] for process in range(options.processes)
        ]
        self._learner: Connection | None = None
        self.total = Report()

    def start_learner(self, *, is_training: bool = True, step_s: float = 0.0) -> None:
        _, self._learner = self._started.start(run_learner, self._server.address, is_training, step_s)
        assert receive(self._learner, _START_S) == "attached"

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        for fleet in self._fleets:
            fleet.send((method, *arguments))
        return [receive(fleet, _START_S) for fleet in self._fleets]

    def join(self, total: int) -> None:
        """Connect generators until ``total`` are connected and welcome."""
        num = len(self._fleets)
        for index, fleet in enumerate(self._fleets):
            fleet.send(("num_connected",))
            wanted = total // num + (index < total % num)
            have = receive(fleet, _START_S)
            fleet.send(("join", wanted - have))
            receive(fleet, _START_S)
        deadline = time.monotonic() + _START_S
        while sum(self._call("num_welcome")) < total:
            if time.monotonic() > deadline:
                raise RuntimeError(f"expected {total} welcome generators, got {sum(self._call('num_welcome'))}")
            time.sleep(0.05)

    def pace(self, *, group_s: float, most_leases: int = 1, churn: float = 0.0) -> None:
        self._call("pace", group_s, most_leases, churn / len(self._fleets))

    def report(self) -> Report:
        """Return what was counted since the last report. ``total`` has all of it."""
        return self._add(self._call("report"))

    def finish(self) -> dict[str, Any]:
        """Let all leave, then end the run. Return the queue's status before the end."""
        self._add(self._call("leave"))
        assert self._learner is not None
        self._learner.send("finish")
        return receive(self._learner, _START_S)

    def _add(self, reports: Sequence[Report]) -> Report:
        found = Report()
        for report in reports:
            found.add(report)
        self.total.add(found)
        return found


@contextlib.contextmanager
def a_queue(options: Options, *, groups_per_step: int = 512, max_staleness: int = 8) -> Iterator[tuple[Server, Load]]:
    """Yield a server of its own, in a directory that is removed, and a load without generators or a learner."""
    options.directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="queue-limits-", dir=options.directory) as name, processes() as started:
        server = Server(write_config(Path(name), groups_per_step=groups_per_step, max_staleness=max_staleness))
        try:
            yield server, Load(started, server, options)
        finally:
            server.end()


# What is measured.


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen in a while: rates, the shares of one processor, and the server's memory at the end.

    ``starved_share``: of the time, in which the server's loop had work and got no processor.
    """

    seconds: float
    report: Report
    cpu_share: float
    loop_share: float
    starved_share: float
    rss_mb: float

    @property
    def requests_per_s(self) -> float:
        return self.report.replies.total() / self.seconds

    @property
    def groups_per_s(self) -> float:
        return self.report.verdicts["queued"] / self.seconds

    @property
    def loop_us(self) -> float:
        """Microseconds of the loop's thread for each request. It is the thread that ends first."""
        return 1e6 * self.loop_share / self.requests_per_s if self.requests_per_s else float("nan")

    def line(self) -> str:
        leases, beats = (_percentiles_ms(times) for times in (self.report.lease_s, self.report.heartbeat_s))
        return (
            f"{self.requests_per_s:8.0f} {self.groups_per_s:8.0f}   {leases}   {beats}   "
            f"{self.cpu_share:5.2f} {self.loop_share:5.2f} {self.starved_share:7.2f} {self.loop_us:10.0f} "
            f"{self.rss_mb:8.1f} {self.report.repeated:5d}"
        )


HEADER = "requests groups/s  lease p50, p99 ms  heartbeat p50, p99   CPU  loop starved us/request   RSS MB  sent again"


def _percentiles_ms(times_s: Sequence[float]) -> str:
    p50, p99 = (1e3 * np.percentile(times_s, [50, 99])) if times_s else (float("nan"), float("nan"))
    return f"{p50:8.1f} {p99:8.1f}"


def watch(server: Server, load: Load, seconds: float) -> Window:
    """Look at both for so long."""
    load.report()
    began, cpu = time.monotonic(), server.cpu_s
    time.sleep(seconds)
    report, passed_s = load.report(), time.monotonic() - began
    used, loop, starved = ((after - before) / passed_s for before, after in zip(cpu, server.cpu_s, strict=True))
    return Window(passed_s, report, used, loop, starved, server.rss_mb)


def settle(total: Report, status: Mapping[str, Any], final: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the ledger: what is not accounted for, or differs from what the generators counted."""
    groups = final["groups"]
    dropped = sum(groups["dropped"].values())
    wrong = [f"ledger.json says {final['broken']}"] if "broken" in final else []
    left = {place: groups[place] for place in ("in_flight", "queued", "taken") if groups[place]}
    if left:
        wrong.append(f"after the end of the run groups are left: {left}")
    if groups["issued"] != groups["trained"] + groups["filtered"] + dropped:
        wrong.append(f"issued {groups['issued']} is not trained {groups['trained']} + dropped {dropped}")
    # A generator that left may have missed a reply: so many leases or verdicts may be unknown to the load.
    if not 0 <= groups["issued"] - total.granted <= total.unread:
        wrong.append(
            f"issued {groups['issued']} leases, but generators got {total.granted} ({total.unread} replies unread)"
        )
    before = status["ledger"]["groups"]
    arrived = before["trained"] + before["queued"] + before["taken"]
    if not 0 <= arrived - total.verdicts["queued"] <= total.unread:
        wrong.append(
            f"{arrived} groups arrived, generators know of {total.verdicts['queued']} ({total.unread} replies unread)"
        )
    return wrong


def steady(options: Options) -> list[str]:
    """Print a line for every tenth of the time, and what the first and the last third took. Return what is wrong."""
    windows = list[Window]()
    with a_queue(options) as (server, load):
        load.start_learner()
        load.join(options.generators)
        _warm_up(server, load, options)
        load.pace(group_s=options.group_s, churn=options.churn)
        time.sleep(min(2 * options.group_s, options.seconds / 10))
        print(f"{'s':>6s} {HEADER}")
        for index in range(10):
            window = watch(server, load, options.seconds / 10)
            windows.append(window)
            print(f"{(index + 1) * options.seconds / 10:6.0f} {window.line()}", flush=True)
        status = load.finish()
        server.process.wait(_START_S)
        final, total = json.loads((server.run_dir / "ledger.json").read_text()), load.total
    first, late = (mean(window.rss_mb for window in part) for part in (windows[:3], windows[-3:]))
    groups = final["groups"]
    print(f"memory: {first:.1f} MB in the first third, {late:.1f} MB in the last")
    print(f"leases: {groups['issued']} issued = {groups['trained']} trained + dropped {_nonzero(groups['dropped'])}")
    print(
        f"generators that left held {total.given_back} leases (with a goodbye) and {total.abandoned} (without); "
        f"{total.unread} of their requests were unanswered; verdicts {dict(total.verdicts)}"
    )
    return [*settle(total, status, final), *sorted(set(total.errors))]


def _warm_up(server: Server, load: Load, options: Options) -> None:
    """Return groups twice as fast as one core can, until the server knows as many ended leases as it ever keeps."""
    began = time.monotonic()
    load.pace(group_s=options.generators / 2000)
    while load.total.verdicts.total() < options.warm_up_leases:
        load.report()
        time.sleep(0.2)
    print(f"warm-up: {load.total.verdicts.total()} groups in {time.monotonic() - began:.0f} s, {server.rss_mb:.1f} MB")


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {cause: count for cause, count in counts.items() if count}


def saturate(options: Options) -> list[str]:
    """Raise the offered groups/s by half until the server falls behind; then measure half of the most that it did."""
    most, offered, group_s = 0.0, 200.0, 0.0
    with a_queue(options) as (server, load):
        load.start_learner()
        load.join(options.generators)
        print(f"{'offered':>8s} {HEADER}")

        def measure(groups_per_s: float) -> Window:
            nonlocal group_s
            before_s, group_s = group_s, options.generators / groups_per_s
            load.pace(group_s=group_s)
            time.sleep(max(options.seconds / 3, 1.5 * max(before_s, group_s)))
            window = watch(server, load, options.seconds)
            print(f"{groups_per_s:8.0f} {window.line()}", flush=True)
            return window

        best = measure(offered)
        while best.groups_per_s > 0.9 * offered or most == 0:
            most, offered = best.groups_per_s, 1.5 * offered
            best = max(best, measure(offered), key=lambda window: window.groups_per_s)
        print(
            f"saturated: {best.requests_per_s:.0f} requests/s, {best.groups_per_s:.0f} groups/s, at "
            f"{best.loop_share:.2f} of a core; half of that:"
        )
        measure(best.groups_per_s / 2)
        load.finish()
    return []


def waiting(options: Options) -> list[str]:
    """Measure while half of the generators wait for a lease: the staleness bound allows fewer groups."""
    with a_queue(options, groups_per_step=max(1, options.generators // 4), max_staleness=1) as (server, load):
        load.start_learner()
        load.join(options.generators)
        load.pace(group_s=2.0)
        time.sleep(options.seconds / 3)
        print(HEADER)
        print(watch(server, load, options.seconds).line())
        load.finish()
    return []


def memory(options: Options) -> list[str]:
    """Connect generators in ten parts, each with a lease, and print the slope of the server's memory."""
    numbers, sizes = list[int](), list[float]()
    with a_queue(options) as (server, load):
        load.start_learner()
        load.pace(group_s=3600.0)
        for part in range(11):
            numbers.append(options.generators * part // 10)
            load.join(numbers[-1])
            time.sleep(options.seconds / 10)
            sizes.append(server.rss_mb)
        load.finish()
    print("  ".join(f"{number}: {size:.1f}" for number, size in zip(numbers, sizes, strict=True)), "MB")
    print(f"{1024 * np.polyfit(numbers, sizes, 1)[0]:.1f} KiB a connected generator with a lease")
    return []


def restart(options: Options) -> list[str]:
    """Fill the queue, kill the server, and measure how long the next one takes until it answers."""
    per_step = max(1, options.groups // 100)
    with a_queue(options, groups_per_step=per_step, max_staleness=options.groups // per_step - 1) as (server, load):
        empty_s = _seconds_to_answer(server)
        load.start_learner(is_training=False)
        load.join(min(options.generators, 50))
        load.pace(group_s=0.0, most_leases=64)
        began, num_queued = time.monotonic(), 0
        while num_queued < options.groups:
            time.sleep(0.1)
            num_queued += load.report().verdicts["queued"]
        filled_s, rss_mb = time.monotonic() - began, server.rss_mb
        time.sleep(1.5)
        files = {path: path.stat().st_size for path in (server.run_dir / "queue").iterdir()}
        server.kill()
        full_s = _seconds_to_answer(server)
        cpu_s, _, starved_s = server.cpu_s
        queue = LearnerQueue(server.address, _START_S)
        depth = queue.status()["depth"]
        queue.close()
        print(f"{num_queued} groups queued in {filled_s:.0f} s; after the restart {depth}")
        index = sum(size for path, size in files.items() if "index" in path.name)
        print(
            f"disk: {index / 2**20:.0f} MB index, {(sum(files.values()) - index) / 2**20:.0f} MB groups; memory "
            f"{rss_mb:.0f} MB before, {server.rss_mb:.0f} MB after"
        )
        print(
            f"start of the process to its first answer: {full_s:.1f} s ({cpu_s:.1f} of a processor, "
            f"and {starved_s:.1f} waiting for one), without groups {empty_s:.1f} s"
        )
        load.finish()
    return [] if depth == num_queued else [f"expected {num_queued} groups after the restart, got {depth}"]


def _seconds_to_answer(server: Server) -> float:
    server.end()
    began = time.monotonic()
    server.start()
    queue = LearnerQueue(server.address, _START_S)
    queue.ping()
    queue.close()
    return time.monotonic() - began


MEASURES: Mapping[str, Callable[[Options], list[str]]] = {
    "steady": steady, "saturate": saturate, "waiting": waiting, "memory": memory, "restart": restart,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, measure in MEASURES.items():
        parser.add_argument(f"--{name}", action="store_true", help=(measure.__doc__ or "").partition("\n")[0])
    parser.add_argument("--generators", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="of the load")
    parser.add_argument("--seconds", type=float, default=None, help="600 for --steady, else 15 for each rate")
    parser.add_argument("--group-s", type=float, default=10.0, help="seconds that a generator takes for a group")
    parser.add_argument("--churn", type=float, default=10.0, help="generators that leave, and that join, in a second")
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--warm-up-leases", type=int, default=_REMEMBERED)
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="on a disk, not in memory")
    plain = parser.parse_args()
    chosen = [name for name in MEASURES if getattr(plain, name)]
    if not chosen:
        parser.error(f"expected one of {', '.join('--' + name for name in MEASURES)}")
    wrong: list[str] = []
    for name in chosen:
        seconds = plain.seconds or (600.0 if name == "steady" else 15.0)
        options = Options(
            plain.dir, plain.generators, plain.processes, seconds, plain.group_s, plain.churn, plain.groups,
            plain.warm_up_leases,
        )  # fmt: skip
        print(f"\n{name}: {options.generators} generators, {os.cpu_count()} cores", flush=True)
        wrong += MEASURES[name](options)
    if wrong:
        raise SystemExit("queue_limits: " + "\n".join(wrong))


if __name__ == "__main__":
    main()
