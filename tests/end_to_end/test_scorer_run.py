"""A run whose scorers are killed: grading pauses until they are back, and nothing is lost or scored 0."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from async_rl.extensions.quickstart import sums
from tests.end_to_end.harness import check_ledger, metrics, processes_of, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.forked_roles import command_line
from tests.ports import free_address


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


def num_starts(log: Path) -> int:
    """How often the scorer of ``log`` has said where it is reached."""
    return len(re.findall(r"scorer \w+ at", log.read_text()))


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
        learner={"steps": 100_000},  # the run is ended once the scorers were missed and came back
    )
    path, run_dir = write_config(tmp_path / "config.toml", config), tmp_path / "run"
    logs = run_dir / "logs"
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(path), env={"ASYNC_RL_TEST": str(tmp_path)})
        wait_until("a step", lambda: steps(run_dir), deadline_s=150)
        launch.kill(signal.SIGSTOP)  # else it may start them again before anybody misses them
        for name in ("judge", "teacher"):
            os.kill(process_of(f"ASYNC_RL_TEST={tmp_path}", name), signal.SIGKILL)
        wait_until("a wait", lambda: "grading waits: nothing listens" in (logs / "generator-0.log").read_text())
        launch.kill(signal.SIGCONT)
        for log in (logs / "scorer-judge.log", logs / "scorer-teacher.log"):
            wait_until(log.name, lambda log=log: num_starts(log) == 2)
        last = steps(run_dir)[-1]
        # What was graded before may make four more steps: three of the bound, and one that had begun.
        wait_until("steps with what they graded", lambda: steps(run_dir)[-1] > last + 4)
        launch.kill(signal.SIGTERM)
        assert launch.wait() == 143
    rows = metrics(run_dir)
    assert steps(run_dir) == list(range(1, steps(run_dir)[-1] + 1))
    assert all(row["reward/model"] != 0 for row in rows if "version" in row)
    assert all(row["distill/kl"] != 0 and 0 < row["distill/top_k_mass"] < 1 for row in rows if "version" in row)
    assert num_starts(logs / "scorer-judge.log") == num_starts(logs / "scorer-teacher.log") == 2
    ledger = check_ledger(run_dir)
    assert not any(ledger["groups"]["dropped"].values())
