"""Roles killed at every named place: each prompt is still trained on exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.faults_harness import Victim, fault_config, fault_run, judge
from tests.end_to_end.harness import processes_of, wait_until
from tests.fault_points import FAULT_POINTS

VICTIMS: tuple[Victim, ...] = ("learner", "queue", "generator")


@pytest.mark.slow
def test_a_queue_server_dies_and_a_generator_sleeps_past_its_lease(tmp_path: Path):
    num_rows, poison = 61, (7,)
    # The bound is wide: the lease of the generator that sleeps is lost by expiry, not because steps make it stale.
    config = fault_config(tmp_path, num_rows=num_rows, poison=poison, queue={"max_staleness": 16})
    with fault_run(tmp_path, config) as run:
        run.begin()
        run.hold("generator.sampled")
        run.kill_at("learner.trained", "queue")
        wait_until("an expired lease", run.tended(lambda: run.ledger()["groups"]["dropped"]["expired"]))
        run.gates.release("generator.sampled")
        run.finish()
        logs = [run.log_of(f"generator-{index}") for index in range(2)]
        assert any("the queue did not take lease" in log and "unknown_lease" in log for log in logs)
        assert "Traceback" not in run.log_of("learner")
        assert "is gone; starting it again from its journal" in run.log_of("learner")
    print(judge(run.run_dir, num_rows=num_rows, poison=poison))


@pytest.mark.parametrize(
    "kills, num_rows",
    [
        pytest.param([(p, VICTIMS[i % 3]) for i, p in enumerate(FAULT_POINTS)], 103, marks=pytest.mark.slow, id="some"),
        pytest.param([(p, v) for p in FAULT_POINTS for v in VICTIMS], 183, marks=pytest.mark.long, id="all"),
    ],
)
def test_each_role_killed_at_each_fault_point_loses_and_repeats_no_prompt(
    tmp_path: Path, kills: list[tuple[str, Victim]], num_rows: int
):
    poison = (7, 50)
    config = fault_config(tmp_path, num_rows=num_rows, poison=poison)
    with fault_run(tmp_path, config) as run:
        run.begin()
        for number, (point, victim) in enumerate(kills):
            run.kill_at(point, victim, index=number)
            print(f"step {run.last_step()}: killed the {victim} at {point}")
            run.await_step(run.last_step() + 2)  # until generators are busy again
        assert not run.is_finished
        run.finish()
        assert "Traceback" not in run.log_of("learner")
    print(f"{judge(run.run_dir, num_rows=num_rows, poison=poison)}; {run.num_starts} starts")


@pytest.mark.slow
def test_launch_brings_back_what_is_killed_under_it(tmp_path: Path):
    num_rows, poison = 82, (7,)  # an odd number of good rows: the last step has one group
    config = fault_config(tmp_path, num_rows=num_rows, poison=poison, generator={"count": 2})
    with fault_run(tmp_path, config) as run:
        run.launch()
        run.kill_at("queue.journaled")
        run.kill_at("generator.sampled")
        run.kill_at("generator.activating")
        wait_until("a checkpoint", run.tended((run.run_dir / "checkpoints" / "latest").exists))
        run.kill_at("learner.acknowledged")
        run.kill_at("queue.journaled")
        run.finish()
        assert not processes_of(run.marker)
        log = run.log_of("launch")
        assert "queue was killed by SIGKILL; restarting it" in log
        assert "learner-0 was killed by SIGKILL; restarting the learner from step-" in log
    print(judge(run.run_dir, num_rows=num_rows, poison=poison))
