"""A run of real processes, all killed again and again, with a damaged file each time. The same command goes on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.damage import damage
from tests.end_to_end.faults_harness import FaultRun, fault_config, fault_run, judge, kill_all
from tests.end_to_end.harness import wait_until

TARGETS = {
    "group": "queue/group-*",
    "index": "queue/index.sqlite",
    "wal": "queue/index.sqlite-wal",
    "checkpoint": "checkpoints/step-??????/**/*",
    "latest": "checkpoints/latest",
}
SEED = 15
WAIT_S = 240.0


def files_of(run_dir: Path, target: str) -> list[Path]:
    """The files that may be damaged; of checkpoints, those of the newest."""
    paths = sorted(p for p in run_dir.glob(TARGETS[target]) if p.is_file() and p.stat().st_size)
    if target == "checkpoint":
        newest = (run_dir / "checkpoints" / "latest").read_text().strip()
        paths = [p for p in paths if newest in p.parts]
    return paths


def new_checkpoints(run: FaultRun, count: int) -> None:
    """Wait for this many checkpoints of the present learner."""
    latest = run.run_dir / "checkpoints" / "latest"
    for _ in range(count):
        before = latest.read_bytes() if latest.exists() else None
        is_new = run.tended(lambda: latest.exists() and latest.read_bytes() != before)  # noqa: B023
        wait_until("a checkpoint", is_new, deadline_s=WAIT_S)


def live(directory: Path, rounds: list[tuple[str, ...]], *, seed: int, num_rows: int) -> str:
    """One run: in each round, kill all processes, damage these targets, and start again. A line of what happened."""
    random = Random(seed)
    with fault_run(directory, fault_config(directory, num_rows=num_rows)) as run:
        run.begin_launch()
        done: list[str] = []
        for targets in rounds:
            # Two whole checkpoints, so that there is one to go back to.
            new_checkpoints(run, 2)
            run.hold("learner.taken")  # groups arrive meanwhile, and stay queued
            wait_until("files", run.tended(lambda: all(files_of(run.run_dir, target) for target in targets)))  # noqa: B023
            kill_all(run.marker)
            assert not run.is_finished, "the run ended before all damage was done: it needs more rows"
            done += [damage(random.choice(files_of(run.run_dir, target)), random) for target in targets]
        run.finish(WAIT_S)
        line = judge(run.run_dir, num_rows=num_rows)
    return "\n".join([*done, line])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_files_are_damaged_goes_on_with_the_same_command(tmp_path: Path):
    print(live(tmp_path, [("group", "checkpoint"), ("index", "latest")], seed=SEED, num_rows=40))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_runs_whose_files_are_damaged_often_go_on_with_the_same_command(tmp_path: Path, seed: int):
    random = Random(seed)
    rounds = [(random.choice(list(TARGETS)),) for _ in range(10)]
    print(live(tmp_path, rounds, seed=SEED + seed, num_rows=400))
