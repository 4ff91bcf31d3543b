"""A run whose scorers are killed: grading pauses until they are back, and nothing is lost or scored 0."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import sums
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.end_to_end.harness import check_ledger, metrics, processes_of, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.forked_roles import command_line
from tests.scoring.scripted import free_address


def write_reward_model(directory: Path, policy: Path) -> Path:
    """A random reward model of the policy's shape, with the policy's tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(policy, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    for path in policy.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, directory)
    return directory


def process_of(marker: str, command: str) -> int:
    """The process of the run that was started with ``command``."""
    (pid,) = (pid for pid in processes_of(marker) if command in command_line(pid))
    return pid


@pytest.mark.slow
def test_killed_scorers_are_started_again_and_lose_nothing(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    judge = write_reward_model(tmp_path / "rm", Path(task["model"]))
    sums.write_model(tmp_path / "teacher", seed=1)
    config = tiny_config(
        tmp_path,
        task,
        reward={"type": "model", "model": "judge", "soft_overlong": False},
        scorer={
            "judge": {"model": str(judge), "address": free_address()},
            "teacher": {"model": str(tmp_path / "teacher"), "address": free_address()},
        },
        distill={"teacher": "teacher", "form": "loss", "top_k": 4, "coef": 0.5},
        queue={"lease_timeout_s": 2.0},  # a scorer's start takes longer
        eval={"every": 0},
        learner={"steps": 3},
    )
    path, run_dir = write_config(tmp_path / "config.toml", config), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(path), env={"ASYNC_RL_TEST": str(tmp_path)})
        wait_until("a step", lambda: steps(run_dir), deadline_s=150)
        for name in ("judge", "teacher"):
            os.kill(process_of(f"ASYNC_RL_TEST={tmp_path}", name), signal.SIGKILL)
        launch.succeed()
    rows = metrics(run_dir)
    assert steps(run_dir) == [1, 2, 3]
    assert all(row["reward/model"] != 0 for row in rows if "version" in row)
    assert all(row["distill/kl"] != 0 and 0 < row["distill/top_k_mass"] < 1 for row in rows if "version" in row)
    generator_log = (run_dir / "logs" / "generator-0.log").read_text()
    for name in ("judge", "teacher"):
        assert (run_dir / "logs" / f"scorer-{name}.log").read_text().count(f"scorer {name} at") == 2
    assert "grading waits: nothing listens" in generator_log
    ledger = check_ledger(run_dir)
    assert not any(ledger["groups"]["dropped"].values())
