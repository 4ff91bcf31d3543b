"""Every write, rename, fsync, open and accept of a run fails: what is trained is as if nothing had happened."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from tests.end_to_end.faults_harness import fault_config, judge, kill_all
from tests.end_to_end.harness import roles, wait_until
from tests.end_to_end.syscalls import Failure, SyscallRun, Syscalls, failures_at
from tests.resumable import Passed

Kind = Literal["roles", "launch"]
"""Roles that were started by hand fail, or ``launch`` fails, which starts the others."""
ROLES: dict[Kind, tuple[str, ...]] = {"roles": ("queue", "learner", "generator"), "launch": ("launch",)}
REACHED_S = 2.0
"""How long a role has to make the call, before it is killed and another one begins."""
BEGUN_S = 30.0
NUM_ROWS = 400
NUM_FEW_ROWS = 8


@contextlib.contextmanager
def syscall_run(directory: Path, syscalls: Syscalls, kind: Kind, *, num_rows: int) -> Iterator[SyscallRun]:
    """A run that has not begun. At its end, every prompt was trained on exactly once."""
    directory.mkdir()
    config = fault_config(
        directory, num_rows=num_rows, weights={"deadline_s": 5.0, "transport": "tcp"}, generator={"count": 2}
    )
    with roles(directory / "logs") as start:
        run = SyscallRun(directory, config, start, syscalls, is_launched=kind == "launch")
        try:
            yield run
            run.finish(deadline_s=240)
        finally:
            syscalls.clear()
            kill_all(run.marker)
    print(f"{judge(run.run_dir, num_rows=num_rows)}; {run.num_ends} roles ended, with the cause", flush=True)


def find_places(directory: Path, syscalls: Syscalls, kind: Kind) -> tuple[list[str], list[str]]:
    """Places that a run reaches again and again, and those that it reaches only at its begin or its end."""
    with syscall_run(directory, syscalls, kind, num_rows=NUM_ROWS // 4) as run:
        run.begin()
        run.await_step(3)
        first = syscalls.pop_places()
        for role in ROLES[kind]:
            run.kill_role(role)
            run.await_step(run.last_step() + 5)
        again = syscalls.pop_places()
    once = [place for place in dict.fromkeys([*first, *syscalls.pop_places()]) if place not in again]
    return [p for p in again if p.startswith(ROLES[kind])], [p for p in once if p.startswith(ROLES[kind])]


def fail_in(run: SyscallRun, failure: Failure) -> bool:
    """Make ``failure`` happen, and wait until the run goes on. Returns False if nothing made that call."""

    def is_over_in(limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not run.is_over() and (run.has_hit or time.monotonic() < end):
            run.tend()
            time.sleep(0.02)
        return run.has_hit

    run.arm(failure)
    if not is_over_in(REACHED_S):
        run.arm(replace(failure, skip=0))  # a role that begins may make the call only once
        run.kill_role(failure.role)
        if not is_over_in(BEGUN_S):
            return False
    step = run.last_step()
    wait_until(f"two steps after {failure}", run.tended(lambda: run.is_finished or run.last_step() >= step + 2))
    return True


def failures_of(role: str, places: Sequence[str], chance: random.Random) -> list[Failure]:
    """All failures of a role, in random order."""
    failures = failures_at(place for place in places if place.startswith(role))
    chance.shuffle(failures)
    return failures


def fail_all(
    directory: Path,
    syscalls: Syscalls,
    kind: Kind,
    failures: Sequence[Failure],
    chance: random.Random,
    passed: Passed,
) -> int:
    """Make each failure happen, many in a run, and note it in ``passed``. Returns how many calls were made."""
    left, num_hit, number = list(reversed(failures)), 0, 0
    while left:
        number += 1
        names = []
        with syscall_run(directory / f"run-{number}", syscalls, kind, num_rows=NUM_ROWS) as run:
            run.begin()
            while left and run.last_step() < NUM_ROWS // 4 and not run.is_finished:
                failure = replace(left.pop(), skip=chance.choice((0, 0, 1, 3)))
                began = time.monotonic()
                is_hit = fail_in(run, failure)
                num_hit += is_hit
                names += [_name(failure)] if is_hit else []
                print(f"{'hit' if is_hit else 'NOT'} {failure} ({time.monotonic() - began:.1f} s)", flush=True)
        passed.add(*names)
    return num_hit


def _name(failure: Failure) -> str:
    return f"{failure.place}: {failure.error}"


def fail_once(directory: Path, syscalls: Syscalls, kind: Kind, failure: Failure) -> bool:
    """Make ``failure`` happen at the begin or the end of a short run; returns whether the call was made."""
    with syscall_run(directory, syscalls, kind, num_rows=NUM_FEW_ROWS) as run:
        run.arm(failure)
        run.begin()
        run.finish()
    print(f"{'hit' if run.has_hit else 'NOT'} {failure}", flush=True)
    return run.has_hit


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["roles", "launch"])
def test_every_failing_system_call_loses_and_repeats_no_prompt(tmp_path: Path, passed: Passed, kind: Kind):
    syscalls, chance = Syscalls(tmp_path / "syscalls"), random.Random(0)
    again, once = find_places(tmp_path / "places", syscalls, kind)
    print(f"{len(again)} places reached again and again, {len(once)} once", flush=True)
    every = [failure for role in ROLES[kind] for failure in failures_of(role, again, chance)]
    failures = [failure for failure in every if _name(failure) not in passed]
    num_hit = fail_all(tmp_path, syscalls, kind, failures, chance, passed)
    print(f"{num_hit} of {len(failures)} failures while running, {len(every)} in all", flush=True)
    ends = [failure for failure in failures_at(once) if f"once {_name(failure)}" not in passed]
    num_ends = 0
    for number, failure in enumerate(ends):
        if fail_once(tmp_path / f"once-{number}", syscalls, kind, failure):
            passed.add(f"once {_name(failure)}")
            num_ends += 1
    print(f"{num_ends} of {len(ends)} failures at begin and end, {len(failures_at(once))} in all", flush=True)
    assert num_hit + num_ends >= 0.9 * (len(failures) + len(ends))
