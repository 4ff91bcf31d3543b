"""Whole runs whose rollouts are sessions of agents, which call the generator's HTTP endpoint."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import (
    check_ledger,
    metrics,
    roles,
    steps,
    write_config,
)
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.extensions.agents.world import HEAD

FAKE: dict[str, dict[str, Any]] = {
    "experimental": {"fake": {"mean_tokens": 4.0, "step_time_s": 0.01, "vocab_size": 20}},
    "sampling": {"group_size": 4, "max_new_tokens": 48, "max_prompt_tokens": 16},
    "environment": {"timeout_s": 5.0, "first_reset_timeout_s": 60.0},
    "data": {"epochs": 100},
    "eval": {"every": 0},
    "queue": {"max_staleness": 16},
}
"""A run with the fake backend."""
THREE_CALLS = '''
async def run(task):
    """Its second and third call continue the one before."""
    ids = [1, 2]
    for number in range(3):
        status, answer = await ask(task, ids, max_tokens=4)
        assert status == 200, answer
        ids = [*ids, *answer["token_ids"], 3]
    return float(sum(ids) % 2)
'''


def write_agent_run(directory: Path, source: str, **changes: dict[str, Any]) -> Path:
    """A run of ``tiny_config`` whose rollouts are played by the agent ``run`` of ``source``."""
    agent = directory / "agent.py"
    agent.write_text(HEAD + source)
    config = tiny_config(
        directory,
        write_tiny_task(directory),
        environment={"name": f"{agent}:run"},
        sampling={"group_size": 2, "max_new_tokens": 12, "max_prompt_tokens": 16},
    )
    config["generator"] |= {"serve": True, "allow_code": [str(agent)]}
    config["data"].pop("eval")
    config["log"] = {"rollouts_every": 1, "rollouts_groups": "all"}
    for section, keys in changes.items():
        config.setdefault(section, {}).update(keys)
    return write_config(directory / "config.toml", config)


def trained_calls(run_dir: Path) -> Counter[str]:
    """The calls by kind of all rollouts that were trained, and the rollouts as ``sessions``."""
    counts: Counter[str] = Counter()
    for path in (run_dir / "rollouts").glob("step-*.jsonl"):
        for line in path.read_text().splitlines():
            counts.update(json.loads(line)["session"]["calls"], sessions=1)
    return counts


def settled(run_dir: Path) -> dict[str, Any]:
    """The ledger of a run that has ended, of which nothing is left open."""
    ledger = check_ledger(run_dir)
    groups = ledger["groups"]
    assert groups["queued"] == groups["taken"] == groups["in_flight"] == 0
    return ledger


@pytest.mark.slow
def test_an_agent_trains_on_what_it_was_answered(tmp_path: Path):
    config = write_agent_run(
        tmp_path, THREE_CALLS, queue={"max_staleness": 0}, learner={"steps": 2, "groups_per_step": 4}, eval={"every": 0}
    )
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    run_dir = tmp_path / "run"
    assert steps(run_dir) == [1, 2]
    rows = [row for row in metrics(run_dir) if "version" in row]
    for row in rows:
        lag_0 = {name: row[name] for name in row if name.startswith("lag_0/ratio")}
        assert lag_0
        assert lag_0 == pytest.approx(dict.fromkeys(lag_0, 1.0), abs=1e-5)
    # 2 steps of 4 groups of 2 rollouts of 3 calls.
    kinds = {"first": 16, "continued": 32, "branched": 0, "rewritten": 0, "untrained": 0, "lost": 0}
    assert trained_calls(run_dir) == {"sessions": 16, **kinds}
    assert settled(run_dir)["groups"]["trained"] == 8
