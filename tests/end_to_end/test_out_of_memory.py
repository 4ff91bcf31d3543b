"""Real roles at the memory limit of a cgroup: the kernel kills one, ``launch`` says so and brings it back.

The limit is that of a cgroup of version 1 which the test makes. Where it may not, the test is skipped.
"""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from async_rl.run.directory import RunDir
from tests.end_to_end.faults_harness import FaultRun, fault_config, judge, kill_all
from tests.end_to_end.harness import roles, state_of, wait_until
from tests.processes import children_of

GROUPS = Path("/sys/fs/cgroup/memory")
NUM_ROWS = 32


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of 64 KiB: who is put into it is killed as soon as it needs a page more."""
    group = GROUPS / f"async-rl-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 10))
    except OSError:
        pytest.skip("needs a writable memory cgroup of version 1")
    yield group
    wait_until("the end of the group's processes", lambda: not (group / "cgroup.procs").read_text(), deadline_s=20.0)
    group.rmdir()


def role_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return next((word for word in words if word in ("launch", "queue", "learner", "generator")), "")


@pytest.mark.long
@pytest.mark.parametrize("victim", ["queue", "learner", "generator"])
def test_a_role_that_is_killed_for_memory_comes_back_and_launch_says_why(
    victim: str, tmp_path: Path, small_group: Path
):
    config = fault_config(tmp_path, num_rows=NUM_ROWS)
    with roles(tmp_path / "logs") as start:
        run = FaultRun(tmp_path, config, partial(start, is_program=True))
        try:
            run.begin_launch()
            # A learner that is killed before its first checkpoint ends the run.
            saved = run.tended(lambda: RunDir(run.run_dir).latest_checkpoint)
            wait_until("the first checkpoint", saved, deadline_s=240.0)
            pid = next(child for child in children_of(run.role_pid("launch")) if role_of(child) == victim)
            (small_group / "cgroup.procs").write_text(str(pid))
            wait_until(f"the kill of the {victim}", lambda: state_of(pid) in (None, "Z"))
            run.finish()
            print(judge(run.run_dir, num_rows=NUM_ROWS))
            text = run.log_of("launch")
        finally:
            kill_all(run.marker)
    name = {"queue": "queue", "learner": "learner-0", "generator": "generator-0"}[victim]
    assert f"{name} was killed by SIGKILL, probably because memory ran out (" in text
    assert "against it: raise the limit; or lower" in text
