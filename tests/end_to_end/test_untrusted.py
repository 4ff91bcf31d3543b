"""A generator that is told to end, in real processes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.harness import queue_address, roles, start_ranks, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.long
def test_a_spot_node_that_gets_sigterm_gives_its_leases_back_at_once(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    # An answer takes 240 s, and a lease expires after 600 s: only giving it back ends it.
    raw = tiny_config(
        tmp_path, task,
        generator={"backend": "fake"},
        experimental={"fake": {"mean_tokens": 1e6, "step_time_s": 0.5, "sigma": 0.0}},
        sampling={"max_new_tokens": 480},
        queue={"lease_timeout_s": 600.0},
    )  # fmt: skip
    del raw["data"]["eval"], raw["eval"]
    config = write_config(tmp_path / "config.toml", raw)

    def num_leases() -> int:
        with roles(tmp_path / "logs" / str(time.monotonic_ns())) as start:
            status = start("status", "status", str(tmp_path / "run"), "--json")
            status.succeed()
            return int(json.loads(status.log)["ledger"]["groups"]["in_flight"])

    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(tmp_path / "run"))
        spot = start("spot", "generator", "--connect", address)
        start_ranks(start, config, world_size=1)
        wait_until("its leases", num_leases)
        spot.kill(signal.SIGTERM)
        assert spot.wait(60) == 128 + signal.SIGTERM
        wait_until("no leases", lambda: num_leases() == 0, deadline_s=20)
        start("other", "generator", "--connect", address)
        wait_until("the other's leases", num_leases)
