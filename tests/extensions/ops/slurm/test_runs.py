"""``async-rl slurm`` on a real Slurm, of the test's own: whole runs over two nodes and a third for generators."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from async_rl.process.child import package_path
from tests.end_to_end.harness import check_ledger, command_lines, steps, wait_until
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.extensions.ops.slurm.cluster import Slurm, slurm

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


@dataclass(frozen=True)
class Run:
    """A run of the tiny task on a cluster, in a directory whose name has a space."""

    cluster: Slurm
    directory: Path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def submit(self, *options: str) -> tuple[str, str]:
        """The jobs of the learner and the generators that ``async-rl slurm --submit`` names."""
        command = [sys.executable, "-m", "async_rl", "slurm", "run.toml", "--no-gpus", "--submit", *options]
        environment = {**self.cluster.environment, "PYTHONPATH": package_path({}), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=self.directory, env=environment, capture_output=True, text=True, check=False)
        found = re.match(r"submitted: queue server and learner as job (\d+), generators as job (\d+)\n", done.stdout)
        assert found, done.stdout + done.stderr
        return found[1], found[2]

    def log(self, job: str) -> str:
        """What the tasks of a job wrote."""
        files = sorted((self.directory / "run-slurm").glob(f"*-{job}*.out"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def await_step(self, step: int) -> None:
        wait_until(f"step {step}", lambda: step in steps(self.run_dir), deadline_s=900)

    def check_finished(self, learner: str, generators: str, num_steps: int) -> None:
        """The jobs end by themselves, every step is there once, and no group is left in the ledger."""
        ended = self.cluster.await_end(learner)
        assert ended == {learner: "COMPLETED"}, self.log(learner)
        assert set(self.cluster.await_end(generators).values()) == {"COMPLETED"}, self.log(generators)
        assert steps(self.run_dir) == list(range(1, num_steps + 1))
        groups = check_ledger(self.run_dir)["groups"]
        assert groups["trained"] == 4 * num_steps
        assert groups["in_flight"] == groups["taken"] == 0, groups


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    directory = tmp_path / "shared disk"
    directory.mkdir()
    with slurm() as cluster:
        yield Run(cluster, directory)


def write_run(run: Run, num_steps: int, **changes: dict[str, Any]) -> None:
    task = write_tiny_task(run.directory)
    config = tiny_config(
        run.directory, task, learner={"steps": num_steps}, data={"eval": {}}, checkpoint={"every": 2, "grace_s": 20.0},
        generator={"backend": "transformers", "batch_size": 8, "num_threads": 1}, **changes,
    )  # fmt: skip
    (run.directory / "run.toml").write_text(tomli_w.dumps({**config, "run": {"dir": "run"}}))


def test_a_rank_and_a_generator_that_are_killed_go_on(run: Run):
    write_run(run, 40)
    learner, generators = run.submit("--nodes", "2", "--generators", "2")
    run.await_step(4)
    kill_one(run, "generator")
    run.await_step(10)
    kill_one(run, "learner", "RANK=1")
    run.check_finished(learner, generators, 40)
    assert "the learner ended with exit code 137; starting it again from step-" in run.log(learner)
    assert (run.directory / "run-slurm" / "keys").stat().st_mode & 0o777 == 0o700
    parts = sorted(path.name for path in (run.run_dir / "checkpoints" / "step-000040").rglob("*.safetensors"))
    assert parts == [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]  # one of each rank


def test_a_node_that_fails_requeues_the_learner_on_another(run: Run):
    write_run(run, 40)
    learner, generators = run.submit("--nodes", "2", "--generators", "1", "--sbatch", "comment=two words")
    run.await_step(4)
    nodes = run.cluster.run("squeue", "-h", "-j", learner, "-o", "%N").strip()
    second = run.cluster.run("scontrol", "show", "hostnames", nodes).split()[1]
    run.cluster.kill(second)
    run.check_finished(learner, generators, 40)


def test_a_time_limit_requeues_both_jobs(run: Run):
    write_run(run, 100_000)
    learner, generators = run.submit("--nodes", "2", "--generators", "1", "--sbatch", "time=4")
    is_requeued = lambda: steps(run.run_dir) and "requeueing this job" in run.log(learner)  # noqa: E731
    wait_until("a requeue after a step", is_requeued, deadline_s=1200)
    saved = steps(run.run_dir)[-1]
    assert (run.run_dir / "checkpoints" / "latest").read_text().strip() == f"step-{saved:06d}"
    # Both jobs go on, to an end that is near: the config is read again at each start.
    text = (run.directory / "run.toml").read_text()
    (run.directory / "run.toml").write_text(text.replace("steps = 100000", f"steps = {saved + 20}"))
    run.check_finished(learner, generators, saved + 20)
    assert f"resuming from run/checkpoints/step-{saved:06d}" in run.log(learner)


def test_scancel_saves_and_the_same_command_goes_on(run: Run):
    write_run(run, 60)
    options = ("--nodes", "2", "--generators", "1")
    learner, generators = run.submit(*options)
    run.await_step(5)
    run.cluster.run("scancel", learner, generators)
    assert run.cluster.await_end(learner) == {learner: "CANCELLED"}, run.log(learner)
    assert set(run.cluster.await_end(generators).values()) == {"CANCELLED"}, run.log(generators)
    saved = steps(run.run_dir)[-1]
    assert saved < 60
    assert (run.run_dir / "checkpoints" / "latest").read_text().strip() == f"step-{saved:06d}"
    assert "requeueing" not in run.log(learner) + run.log(generators)
    run.check_finished(*run.submit(*options), 60)


def kill_one(run: Run, role: str, *variables: str) -> None:
    """Kill the first process of ``async-rl ROLE`` on the cluster that has these environment variables."""
    for pid, words in command_lines(run.cluster.marker).items():
        is_role = role in words and any(word.endswith("/async-rl") for word in words) and "srun" not in words
        if is_role and pid in run.cluster.processes(*variables):
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"expected a running {role}")
