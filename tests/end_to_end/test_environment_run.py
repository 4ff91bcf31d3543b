"""A run whose rollouts are games of several turns, in real processes, with an environment that sometimes crashes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from async_rl.process.user_code import code_digests
from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

GAME = '''
"""Rewards digits; every seventh prompt's first rollout crashes its process in the second turn."""
import os

async def reset(extra_info):
    extra_info["turn"] = 0
    return "1+1:"

async def step(state, action, extra_info):
    extra_info["turn"] += 1
    if extra_info["turn"] == 2 and extra_info["idx"] % 7 == 0 and extra_info["index"] == 0:
        os._exit(1)
    digits = sum(character.isdigit() for character in action)
    return {"next_state": f"{state}{action}={digits};", "reward": float(digits), "score": digits / 100}
'''


@pytest.mark.slow
def test_games_are_trained_on_and_their_failures_counted(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "eval.jsonl").write_text('{"extra_info": {}}\n' * 3)
    config = write_config(
        tmp_path / "config.toml",
        tiny_config(
            tmp_path,
            task,
            data={"train": "", "eval": {"games": str(tmp_path / "eval.jsonl")}},
            environment={"name": str(tmp_path / "game.py"), "rows": 21, "max_turns": 3, "max_turn_tokens": 3},
            sampling={"group_size": 3, "max_new_tokens": 9, "max_prompt_tokens": 24},
            queue={"lease_timeout_s": 60.0},
            generator={"allow_code": [str(tmp_path / "game.py")]},
        ),
    )
    del_eval = tomllib.loads(config.read_text())
    del_eval["data"]["eval"].pop("held_out", None)
    write_config(config, del_eval)
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    run_dir = tmp_path / "run"
    assert steps(run_dir) == list(range(1, 7))
    rows = [row for row in metrics(run_dir) if "version" in row]
    assert all(1 <= row["turns/mean"] <= 3 for row in rows)
    assert any("eval/games/score" in row for row in metrics(run_dir))
    ledger = check_ledger(run_dir)
    assert ledger["groups"]["trained"] == 24
    name = str(tmp_path / "game.py")
    assert json.loads((run_dir / "code_digests.json").read_text()) == code_digests([name])
    logged = [json.loads(line) for path in (run_dir / "rollouts").glob("step-*.jsonl") for line in path.open()]
    assert logged
    for rollout in logged:
        assert rollout["reward"] == sum(turn["reward"] for turn in rollout.get("turns", ()))
        assert rollout["finish_reason"] == "error" or rollout["sequences"][0].startswith("1+1:")
