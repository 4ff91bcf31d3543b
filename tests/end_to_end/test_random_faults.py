"""Processes killed or stopped for a while at random moments: each prompt is still trained on exactly once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.end_to_end.faults_harness import FaultRun, fault_config, judge, kill_all
from tests.end_to_end.harness import Role, processes_of, roles, wait_until
from tests.forked_roles import command_line

NUM_ROWS, POISON = 162, (3, 100)
FAULTS_A_RUN = 20
VICTIMS = ("learner", "queue", "generator", "queue", "generator")
"""A learner takes several times as long as others to come back."""
STOP_SHARE = 0.3
LONGEST_STOP_S = 2.5
"""Longer than a lease lives."""


@dataclass(frozen=True)
class Setup:
    """One kind of run. ``launch``: ``async-rl launch`` starts the roles, and the same command starts it again."""

    launch: bool
    num_ranks: int
    transport: Literal["gloo", "tcp"]
    on_stale: Literal["drop", "mask", "wait"]


SETUPS = (
    Setup(launch=False, num_ranks=1, transport="gloo", on_stale="drop"),
    Setup(launch=True, num_ranks=1, transport="tcp", on_stale="mask"),
    Setup(launch=False, num_ranks=1, transport="tcp", on_stale="wait"),
    Setup(launch=True, num_ranks=2, transport="gloo", on_stale="drop"),
    Setup(launch=False, num_ranks=1, transport="gloo", on_stale="mask"),
    Setup(launch=True, num_ranks=2, transport="tcp", on_stale="wait"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run for every ``FAULTS_A_RUN`` of ``--kills``, each with its own seed from ``--first-seed`` on."""
    if "seed" in metafunc.fixturenames:
        first, num_faults = metafunc.config.option.first_seed, metafunc.config.option.kills
        left = range(num_faults, 0, -FAULTS_A_RUN)
        metafunc.parametrize("seed, num_faults", [(first + i, min(n, FAULTS_A_RUN)) for i, n in enumerate(left)])


class RandomRun(FaultRun):
    """A run of any ``Setup``."""

    def __init__(self, directory: Path, config: Path, start: Callable[..., Role], setup: Setup) -> None:
        super().__init__(directory, config, start)
        self._setup = setup

    def begin(self) -> None:
        if self._setup.launch:
            self.launch()
        else:
            super().begin()

    def tend(self) -> None:
        """Start again what was killed, and a ``launch`` that ended because its learner was."""
        launch = self._roles.get("launch")
        if launch is not None and launch.process.poll() == 1 and "was killed by SIGKILL" in launch.tail():
            self._begin_role("launch", *launch.arguments)
        super().tend()

    def strike(self, victim: str, chance: random.Random) -> str:
        """Kill a process of that role, or stop it for a while. Returns which."""
        pids = wait_until(f"a {victim}", self.tended(lambda: self._pids_of(victim)))
        pid = chance.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            if chance.random() >= STOP_SHARE:
                os.kill(pid, signal.SIGKILL)
                return f"killed the {victim}"
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, LONGEST_STOP_S))
            os.kill(pid, signal.SIGCONT)
        return f"stopped the {victim} for a while"

    def _pids_of(self, victim: str) -> list[int]:
        return sorted(pid for pid in processes_of(self.marker) if _role_of(pid) == victim)


def _role_of(pid: int) -> str | None:
    """The role of a process: the first word after the package's name. None if it has none, or ended."""
    try:
        words = command_line(pid)
    except OSError:
        return None
    return words[words.index("async_rl") + 1] if "async_rl" in words else None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_struck_at_random_moments_lose_and_repeat_no_prompt(tmp_path: Path, seed: int, num_faults: int):
    setup, chance = SETUPS[seed % len(SETUPS)], random.Random(seed)
    config = fault_config(
        tmp_path, num_rows=NUM_ROWS, poison=POISON, queue={"on_stale": setup.on_stale, "wait_s": 1.0},
        learner={"nproc": setup.num_ranks}, weights={"transport": setup.transport}, generator={"count": 2},
    )  # fmt: skip
    plan = sorted(
        (chance.randrange(1, NUM_ROWS // 4), chance.random(), VICTIMS[n % len(VICTIMS)]) for n in range(num_faults)
    )
    if setup.launch:
        plan[num_faults // 2] = (*plan[num_faults // 2][:2], "launch")
    with roles(tmp_path / "logs") as start:
        run = RandomRun(tmp_path, config, start, setup)
        try:
            run.begin()
            for step, delay, victim in plan:
                run.await_step(step)
                time.sleep(0.4 * delay)  # any moment of the step or the next ones
                print(f"step {run.last_step()}: {run.strike(victim, chance)}", flush=True)
            assert not run.is_finished
            run.finish(deadline_s=240)
        finally:
            kill_all(run.marker)
    print(f"seed {seed}, {setup}: {judge(run.run_dir, num_rows=NUM_ROWS, poison=POISON)}; {run.num_starts} starts")
