"""A run whose judge is down for a while: grading pauses until it is back, and nothing is lost or scored 0."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import check_ledger, metrics, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.rewards.served_judge import Reply, completion, judge

NUM_BEFORE = 12
"""Answers that the judge scores before it is down: more than a step has, fewer than the run."""


@pytest.mark.slow
def test_a_judge_that_is_down_for_a_while_loses_nothing(tmp_path: Path):
    is_up, lock, num_scored = threading.Event(), threading.Lock(), [0]

    def answer(_: dict[str, Any]) -> Reply:
        with lock:
            if num_scored[0] >= NUM_BEFORE and not is_up.is_set():
                return 503, "overloaded"
            num_scored[0] += 1
            return completion("Score: 4" if num_scored[0] % 2 else "Score: 6")

    generator_log = tmp_path / "run" / "logs" / "generator-0.log"
    with judge(answer) as server, roles(tmp_path / "logs") as start:
        settings = {"endpoint": server.url, "model": "m", "rubric": "{prompt}{answer}", "completion_price": 1.0}
        config = tiny_config(
            tmp_path,
            write_tiny_task(tmp_path),
            reward={"type": "judge", "judge": settings, "soft_overlong": False},
            queue={"lease_timeout_s": 2.0},
            eval={"every": 0},
            learner={"steps": 3},
        )
        launch = start("launch", "launch", str(write_config(tmp_path / "config.toml", config)))
        waits = f"the judge at {server.url}/chat/completions does not answer: HTTP 503"
        wait_until("the pause", lambda: generator_log.exists() and waits in generator_log.read_text(), deadline_s=150)
        is_up.set()
        launch.succeed()
    assert steps(tmp_path / "run") == [1, 2, 3]
    rows = [row for row in metrics(tmp_path / "run") if "version" in row]
    # The same answer is judged once, so the shares of both scores are not known.
    assert all(0.4 <= row["reward/judge"] <= 0.6 for row in rows)
    assert not any(check_ledger(tmp_path / "run")["groups"]["dropped"].values())
