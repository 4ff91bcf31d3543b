"""Whole runs that a user's script starts: its own function is the reward, Ctrl-C saves. Failures: ``tests/api``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import async_rl
from async_rl.process.child import package_environment
from tests.end_to_end.harness import check_ledger, processes_of, steps, wait_until
from tests.end_to_end.tiny import tiny_config, write_tiny_task

pytestmark = pytest.mark.slow

SCRIPT = """
import json
import async_rl

def lucky(completions, gt_answer, **kwargs):
    assert all(isinstance(answer, str) for answer in gt_answer)
    return [len(completion[0]["content"]) / 100 for completion in completions]

if __name__ == "__main__":
    rows = [json.loads(line) for line in open("train.jsonl")]
    run = async_rl.train(config=json.load(open("base.json")), data=rows, reward={"type": lucky})
    print("returned:", run.is_finished, run.last_step)
"""


def write_script(folder: Path, **changes: Any) -> list[str]:
    """The script, its rows and its config in ``folder``; return the command that runs it."""
    task = write_tiny_task(folder, num_rows=8)
    fake = {"mean_tokens": 4.0, "vocab_size": 20, "accuracy": 0.5}
    config = tiny_config(
        folder, task, generator={"backend": "fake"}, experimental={"fake": fake}, eval={"every": 0},
        reward={"soft_overlong": False}, **changes,
    )  # fmt: skip
    del config["data"]["train"]
    (folder / "base.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(SCRIPT)
    return [sys.executable, "train.py"]


def start(folder: Path, command: list[str], marker: str = "") -> subprocess.Popen[str]:
    environment = {**package_environment(), "OMP_NUM_THREADS": "1", "ASYNC_RL_TEST": marker}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_ctrl_c_saves_the_last_step_and_the_same_script_goes_on_and_its_run_is_read(tmp_path: Path):
    command = write_script(tmp_path, learner={"steps": 30})
    process = start(tmp_path, command, str(tmp_path))
    wait_until("a checkpoint", (tmp_path / "run" / "checkpoints" / "latest").exists, deadline_s=150)
    process.send_signal(signal.SIGINT)  # to the script alone, as a notebook's interrupt
    output, _ = process.communicate(timeout=120)
    saved = async_rl.Run(tmp_path / "run").last_step
    assert process.returncode == 0, output
    assert "the run was stopped by SIGINT; the same call resumes from step-" in output
    assert f"returned: False {saved}" in output
    assert 2 <= saved < 30
    assert processes_of(f"ASYNC_RL_TEST={tmp_path}") == []
    output, _ = start(tmp_path, command).communicate(timeout=240)
    assert f"goes on from checkpoint step-{saved:06d}" in output
    assert "returned: True 30" in output

    run = async_rl.Run(tmp_path / "run")
    assert (run.config.reward.type, run.config.generator.allow_code) == ("train.py:lucky", ("train.py",))
    assert run.config.data.train == f"{tmp_path}/run/data/{next((tmp_path / 'run' / 'data').iterdir()).name}"
    check_ledger(run.path)
    assert list(run.metrics_frame().index) == list(range(1, 31)) == steps(run.path)
    assert list(run.evaluations_frame().index) == [("held_out", 0), ("held_out", 30)]
    rollouts = run.rollouts_frame()
    assert min(rollouts["reward"].to_list()) > 0
    assert [set(parts) for parts in rollouts["reward_parts"]] == [{"lucky"}] * len(rollouts)
    assert len(list(run.answers("held_out", 30))) == 8
    assert run.export_path is not None
    assert run.status()["finished"]
