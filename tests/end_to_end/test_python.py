"""Whole runs that a user's script starts: its own function is the reward, Ctrl-C saves, a failure is an exception."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import async_rl
from async_rl.process.child import package_environment
from tests.end_to_end.harness import check_ledger, processes_of, steps, wait_until
from tests.end_to_end.tiny import tiny_config, write_tiny_task

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import async_rl
from async_rl.errors import RunFailedError
from async_rl.rewards.conformance import WRONG_ANSWER

def lucky(completions, gt_answer, **kwargs):
    assert all(isinstance(answer, str) for answer in gt_answer)
    return [len(completion[0]["content"]) / 100 for completion in completions]

def breaks(item):
    if item.text not in (WRONG_ANSWER, item.reward_data["gt_answer"]):  # not those of the trial before the start
        raise ZeroDivisionError("the first cause")
    return 1.0

if __name__ == "__main__":
    rows = [json.loads(line) for line in open("train.jsonl")]
    function = {"lucky": lucky, "breaks": breaks}[sys.argv[1]]
    try:
        run = async_rl.train(config=json.load(open("base.json")), data=rows, reward={"type": function})
        print("returned:", run.is_finished, run.last_step)
    except RunFailedError as error:
        print("raised:", error)
"""


def write_script(folder: Path, script: str = SCRIPT, **changes: Any) -> list[str]:
    """The script, its rows and its config in ``folder``; return the command that runs it."""
    task = write_tiny_task(folder, num_rows=8)
    fake = {"mean_tokens": 4.0, "vocab_size": 20, "accuracy": 0.5}
    config = tiny_config(
        folder, task, generator={"backend": "fake"}, experimental={"fake": fake}, eval={"every": 0},
        reward={"soft_overlong": False}, **changes,
    )  # fmt: skip
    del config["data"]["train"]
    (folder / "base.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(textwrap.dedent(script))
    return [sys.executable, "train.py"]


def start(folder: Path, command: list[str], marker: str = "") -> subprocess.Popen[str]:
    environment = {**package_environment(), "OMP_NUM_THREADS": "1", "ASYNC_RL_TEST": marker}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_script_trains_with_its_own_function_and_reads_the_run(tmp_path: Path):
    process = start(tmp_path, [*write_script(tmp_path, learner={"steps": 3}), "lucky"], str(tmp_path))
    output, _ = process.communicate(timeout=240)
    assert "returned: True 3" in output
    assert processes_of(f"ASYNC_RL_TEST={tmp_path}") == []
    run = async_rl.Run(tmp_path / "run")
    assert (run.config.reward.type, run.config.generator.allow_code) == ("train.py:lucky", ("train.py",))
    assert run.config.data.train == f"{tmp_path}/run/data/{next((tmp_path / 'run' / 'data').iterdir()).name}"
    check_ledger(run.path)
    assert list(run.metrics_frame().index) == [1, 2, 3] == steps(run.path)
    assert list(run.evaluations_frame().index) == [("held_out", 0), ("held_out", 3)]
    rollouts = run.rollouts_frame()
    assert min(rollouts["reward"].to_list()) > 0
    assert [set(parts) for parts in rollouts["reward_parts"]] == [{"lucky"}] * len(rollouts)
    assert len(list(run.answers("held_out", 3))) == 8
    assert run.export_path is not None
    assert run.status()["finished"]


def test_ctrl_c_saves_the_last_step_and_the_same_script_goes_on(tmp_path: Path):
    command = [*write_script(tmp_path, learner={"steps": 30}), "lucky"]
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


def test_a_run_that_fails_raises_the_first_cause(tmp_path: Path):
    output, _ = start(tmp_path, [*write_script(tmp_path), "breaks"]).communicate(timeout=240)
    raised = output.partition("raised: async-rl: the run stopped: ")[2]
    assert "first cause: learner-0 exited with code 2" in raised
    assert "ZeroDivisionError: the first cause" in raised


def test_a_script_without_a_guard_is_refused_and_starts_nothing(tmp_path: Path):
    guarded = textwrap.dedent(SCRIPT)
    before, _, after = guarded.partition('if __name__ == "__main__":\n')
    command = write_script(tmp_path, before + textwrap.dedent(after))
    process = start(tmp_path, [*command, "lucky"])
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "ConfigError: reward.type: lucky is a function of the script" in output
    assert not (tmp_path / "run").exists()
