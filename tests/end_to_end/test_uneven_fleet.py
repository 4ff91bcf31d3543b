"""A fleet with a generator that is far slower than the others, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.harness import check_ledger, metrics, queue_address, roles, steps, wait_until, write_config
from tests.end_to_end.test_roles import start_generator, start_ranks
from tests.end_to_end.tiny import tiny_config, write_tiny_task

SLOW_STEP_S = 3.0
"""A group of 6 tokens takes the slow generator 18 s, and the other 0.3 s."""


@pytest.mark.long
def test_a_generator_that_is_too_slow_for_the_bound_is_named_and_holds_no_step_up(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    raw = tiny_config(
        tmp_path, task,
        generator={"backend": "fake"},
        experimental={"fake": {"mean_tokens": 6.0, "step_time_s": 0.05, "sigma": 0.0, "vocab_size": 20}},
        learner={"steps": 60, "groups_per_step": 4},
        queue={"max_staleness": 1, "on_stale": "wait", "filter_range": []},
        eval={"every": 0},
    )  # fmt: skip
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        queue = start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(tmp_path / "run"))
        start_generator(start, "slow", address, f"experimental.fake.step_time_s={SLOW_STEP_S}")
        start_generator(start, "fast", address)
        (learner,) = start_ranks(start, config, world_size=1)
        note = "generator 'slow' gets no training leases, because it is too slow for a staleness bound of 1"
        wait_until("the note", lambda: note in queue.log, deadline_s=200)
        began = len(steps(tmp_path / "run"))
        status = start("status", "status", str(tmp_path / "run"), "--json")
        status.succeed()
        shown = {one["id"]: one["too_slow"] for one in json.loads(status.log)["generators"]}
        learner.succeed()
    assert shown["fast"] == ""
    assert shown["slow"].startswith("too slow for a staleness bound of 1: a group takes it about")
    waits = [row["time/wait_s"] for row in metrics(tmp_path / "run") if "time/wait_s" in row]
    # Leases that it had before may hold up two more steps, but no later one.
    assert sum(wait > 3 * SLOW_STEP_S for wait in waits[began:]) <= 2
    assert len(waits) == 60
    check_ledger(tmp_path / "run")
