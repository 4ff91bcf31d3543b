"""Which of a step's rollouts are written down, and what a line says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.learner.recorder import log_rollouts
from async_rl.queue.messages import TakenGroup
from tests.generator.leases import make_lease
from tests.queue.builders import group, make_config

NUM_GROUPS = 6


def logged(directory: Path, *, step: int = 1, seed: int = 0, masked: bool = False, **log: Any) -> list[dict[str, Any]]:
    lease = make_lease()
    taken = [
        TakenGroup(group(make_lease(str(i)), version=2 + i), lease.prompt, 0.0, 0, masked) for i in range(NUM_GROUPS)
    ]
    config = make_config(str(directory), run={"seed": seed}, log=log)
    log_rollouts(directory, taken, step=step, version=9, config=config, decode=lambda ids: " ".join(map(str, ids)))
    path = directory / "rollouts" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def groups_in(lines: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line["lease_id"] for line in lines))


def test_a_line_tells_text_reward_parts_and_versions_and_whose_it_is(tmp_path: Path):
    first, second, *_ = logged(tmp_path, rollouts_groups="all")
    assert first == {
        "position": 0, "lease_id": "0", "generator": "g0", "trained_at": 9, "masked": False, "index": 0, "row": 0,
        "messages": [{"role": "user", "content": "1+1"}], "response": "2 3 4", "extracted": None, "expected": "2",
        "accuracy": 1.0, "reward": 1.0, "reward_parts": {"correct": 1.0}, "finish_reason": "stop", "num_tokens": 3,
        "versions": [2, 2],
    }  # fmt: skip
    assert (second["index"], second["lease_id"], second["accuracy"]) == (1, "0", 0.0)
    assert logged(tmp_path / "masked", masked=True)[0]["masked"]


def test_all_groups_are_written_in_their_order(tmp_path: Path):
    for name, groups in (("all", "all"), ("many", 100)):
        lines = logged(tmp_path / name, rollouts_groups=groups)
        assert groups_in(lines) == [str(i) for i in range(NUM_GROUPS)]
        assert len(lines) == 2 * NUM_GROUPS


def test_some_groups_are_drawn_by_seed_and_step(tmp_path: Path):
    draws = {
        (seed, step): groups_in(logged(tmp_path / f"{seed}-{step}", seed=seed, step=step, rollouts_every=1))
        for seed in range(2) for step in range(1, 13)
    }  # fmt: skip
    assert all(len(draw) == 2 and draw == sorted(draw) for draw in draws.values())
    assert {name for draw in draws.values() for name in draw} == {str(i) for i in range(NUM_GROUPS)}
    assert groups_in(logged(tmp_path / "again", seed=1, step=5, rollouts_every=1)) == draws[1, 5]
    assert [draws[0, step] for step in range(1, 13)] != [draws[1, step] for step in range(1, 13)]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [1, 5]), (0, [])])
def test_every_so_many_steps_are_written_from_the_first_on(tmp_path: Path, every: int, steps: list[int]):
    for step in range(1, 6):
        logged(tmp_path, step=step, rollouts_every=every)
    written = sorted(path.name for path in tmp_path.glob("rollouts/*"))
    assert written == [f"step-{step:06d}.jsonl" for step in steps]
