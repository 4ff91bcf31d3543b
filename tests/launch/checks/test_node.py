"""``async-rl doctor --connect``: a machine is checked as a generator of the run would use it, without a config."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import WeightsError
from async_rl.launch.checks import node
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.node import clock_row, run_node_checks
from async_rl.queue.messages import Announcement
from tests.end_to_end.harness import queue_address, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.parametrize(
    "ahead_s, error_s, state, found",
    [
        (1.5, 0.1, "OK", "1.50 s ahead of this one"),
        (-9.0, 0.1, "WARN", "9.00 s behind this one"),
        (9.0, 8.0, "OK", "9.00 s ahead of"),  # a slow answer says less
        (90.0, 0.0, "WARN", "can't be compared"),
    ],
)
def test_clocks_that_differ_are_named(ahead_s: float, error_s: float, state: str, found: str):
    row = clock_row(ahead_s, error_s)
    assert (row.state, found in row.found) == (state, True), row


class BrokenReceiver:
    """A receiver that gets no weights."""

    error = "no answer from 10.0.0.1:5556"

    def follow(self, announcement: Announcement) -> None:
        pass

    def poll(self) -> None:
        pass


class Followed:
    """A queue client that has an announcement."""

    finished = False
    announcement = Announcement("line", 0, "digest", "tcp://10.0.0.1:5556 key")

    def __init__(self) -> None:
        self.troubles: list[str] = []

    def heartbeat(self, progress: object, stats: object, trouble: str) -> None:
        self.troubles.append(trouble)

    def poll(self, timeout_s: float) -> None:
        pass


def test_the_doctor_does_not_wait_for_weights_that_can_not_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "_LEAST_PATIENCE_S", 0.1)
    monkeypatch.setattr(node, "_PATIENCE", 0.0)
    queue: Any = Followed()
    receiver: Any = BrokenReceiver()
    with pytest.raises(WeightsError, match=r"learner at tcp://10.0.0.1:5556: no answer from 10.0.0.1:5556$"):
        node._check_transfer(queue, receiver, time.monotonic() + 1000.0, lambda _: None)
    assert queue.troubles[0] == BrokenReceiver.error


def states(rows: list[Finding]) -> dict[str, str]:
    return {row.check: row.state for row in rows}


def check(address: str, *overrides: str, deadline_s: float = 120.0) -> list[Finding]:
    return run_node_checks(address, overrides, keys_file=None, insecure=False, deadline_s=deadline_s)


@pytest.mark.slow
def test_a_machine_of_generators_is_checked_against_the_run_itself(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    config = write_config(tmp_path / "config.toml", tiny_config(tmp_path, task, learner={"steps": 2}))
    run_dir = tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(run_dir))
        early = check(address)
        assert states(early)["run"] == "WARN", early
        assert "start the learner" in early[-1].fix
        learner = start("learner", "learner", str(config))
        wait_until("the learner's config", lambda: states(check(address, deadline_s=1.0))["run"] == "OK")
        rows = check(address)
        assert {row.state for row in rows} <= {"OK", "skip"}, rows
        found = {row.check: row.found for row in rows}
        assert "received version 0" in found["weights"]
        assert "activated version 0" in found["engine"]
        assert {"peer", "clock", "run", "torch", "disk", "interface", "reward", "memory"} <= set(found)
        refused = check(address, "generator.backend=nosuch.py:Engine")
        assert states(refused)["engine"] == "FAIL", refused
        assert states(refused)["weights"] == "OK", refused
        # The checks left nothing behind that could stop the run.
        start("generator", "generator", "--connect", address)
        learner.succeed()
    assert steps(run_dir) == [1, 2]
