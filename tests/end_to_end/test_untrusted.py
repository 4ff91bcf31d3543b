"""Fleets with a generator that forges, in real processes: the audit finds it and nobody else, and the run goes on."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from async_rl.run.directory import RunDir
from tests.end_to_end.harness import check_ledger, metrics, queue_address, roles, wait_until, write_config
from tests.end_to_end.test_roles import start_generator, start_ranks
from tests.end_to_end.tiny import tiny_config, write_tiny_task

FORGERS = Path(__file__).with_name("forgers.py")


@pytest.mark.long
def test_a_generator_that_forges_rewards_is_found_and_honest_ones_are_not(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    raw = tiny_config(
        tmp_path, task,
        learner={"steps": 40, "audit_rewards": 1.0},
        queue={"max_staleness": 1},
        weights={"parity": "off"},
        checkpoint={"every": 0},
        eval={"every": 0},
    )  # fmt: skip
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(tmp_path / "run"))
        allowed = f'generator.allow_code=["{FORGERS}"]'
        for name in ("Right", "Bfloat16"):
            start_generator(start, name, address, f"generator.backend={FORGERS}:{name}", allowed)
        start_generator(start, "honest", address)
        (learner,) = start_ranks(start, config, world_size=1)
        learner.succeed()
    found = re.findall(r"generator (\S+) is quarantined: audit of rewards: of \d+ answers in (\d+) groups", learner.log)
    assert found == [("Right", "22")]
    rows = [row for row in metrics(tmp_path / "run") if "version" in row]
    assert rows[-1]["audit/quarantined"] == 1
    assert sum(row["audit/refuted"] for row in rows) >= 44
    # Launch, status and the report read it, also after the generators have left.
    said = RunDir(tmp_path / "run").read_ledger()["group_notes"].values()
    assert [text for text in said if text.startswith("generator 'Right' was quarantined after step ")]
    check_ledger(tmp_path / "run")


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
        spot = start_generator(start, "spot", address)
        start_ranks(start, config, world_size=1)
        wait_until("its leases", num_leases)
        spot.kill(signal.SIGTERM)
        assert spot.wait(60) == 128 + signal.SIGTERM
        wait_until("no leases", lambda: num_leases() == 0, deadline_s=20)
        start_generator(start, "other", address)
        wait_until("the other's leases", num_leases)
