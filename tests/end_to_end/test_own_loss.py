"""Runs with losses and advantages of the user's own, as a user starts them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import ROOT, check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

EXAMPLE = ROOT / "examples" / "own_loss.py"
ADVANTAGE = ROOT / "examples" / "own_advantage.py"

LATE = """import torch
from async_rl.learner.losses.own import LossInputs, LossOutput

calls = []

def loss(inputs: LossInputs) -> LossOutput:
    calls.append(inputs)
    if len(calls) > 6:
        raise ValueError("no more")
    return LossOutput(-(inputs.advantages * inputs.logprobs).sum(), torch.tensor(len(inputs.lag)))
"""
"""It fails in the second step: the trial makes five calls, and a step one."""


def own_config(directory: Path, **changes: dict[str, Any]) -> Path:
    changes["learner"] = {"steps": 3} | changes.get("learner", {})
    changes.setdefault("eval", {"every": 0})
    config = tiny_config(directory, write_tiny_task(directory, num_rows=16), **changes)
    return write_config(directory / "config.toml", config)


@pytest.mark.long
def test_a_run_of_two_ranks_with_the_example_of_dapo_and_a_change_of_its_source_at_a_restart(tmp_path: Path):
    source = tmp_path / "my_loss.py"
    source.write_text(EXAMPLE.read_text())
    own = {"function": f"{source}:dapo", "advantage_function": f"{ADVANTAGE}:discounted"}
    path = own_config(tmp_path, loss=own, learner={"nproc": 2, "max_tokens": 64})
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(path)).succeed()
        source.write_text(EXAMPLE.read_text() + "\n# one more line\n")
        again = start("again", "launch", str(path), "--set", "learner.steps=4")
        again.succeed()
    run_dir = tmp_path / "run"
    assert f"the source of {source}:dapo has changed since this run started" in again.log
    assert f"the source of {ADVANTAGE}:discounted" not in again.log
    assert steps(run_dir) == [1, 2, 3, 4]
    assert all(row["loss_mask/far"] == 0.0 for row in metrics(run_dir) if "loss/policy" in row)
    check_ledger(run_dir)
    digests = json.loads((run_dir / "code_digests.json").read_text())
    assert digests[own["function"]] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert digests[own["advantage_function"]] == hashlib.sha256(ADVANTAGE.read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_run_with_the_soft_clip_and_advantages_by_age(tmp_path: Path):
    loss = {"function": f"{EXAMPLE}:soft_clip", "advantage_function": f"{ADVANTAGE}:by_age"}
    path = own_config(tmp_path, loss=loss)
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(path)).succeed()
    trained = [row for row in metrics(tmp_path / "run") if "loss/policy" in row]
    assert steps(tmp_path / "run") == [1, 2, 3]
    assert all(0.9 < row["loss_metric/gradient_left"] <= 1 for row in trained)
    check_ledger(tmp_path / "run")


@pytest.mark.slow
def test_a_loss_that_fails_during_the_run_stops_it_with_file_and_line(tmp_path: Path):
    source = tmp_path / "late.py"
    source.write_text(LATE)
    path = own_config(tmp_path, loss={"function": f"{source}:loss"})
    with roles(tmp_path / "logs") as start:
        failed = start("failed", "launch", str(path))
        code = failed.wait()
    expected = f'late.py:loss failed: ValueError: no more ({source}, line 9, in loss: raise ValueError("no more"))'
    assert expected in failed.log
    assert "Traceback" not in failed.log
    assert code == 1
