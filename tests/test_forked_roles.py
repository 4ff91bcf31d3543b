"""The tests' own view of processes: a living one is never overlooked."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.end_to_end.harness import processes_of

OPENS_AND_CLOSES = "print('ready', flush=True)\nwhile True:\n    for n in range(20): open('/dev/null').close()"


def test_a_process_that_closes_files_all_the_time_is_found_each_time() -> None:
    marker = f"ASYNC_RL_TEST_FILES={time.monotonic_ns()}"
    name, value = marker.split("=")
    command = [sys.executable, "-c", OPENS_AND_CLOSES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={name: value}, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert [processes_of(marker) for _ in range(100)] == [[process.pid]] * 100
        finally:
            process.kill()
