"""``async_rl.train``: what it raises, returns and writes; the processes themselves are replaced."""

from __future__ import annotations

import json
import math
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import async_rl
from async_rl.config.learner import LearnerConfig
from async_rl.errors import ConfigError, RunError, RunFailedError, StoppedError, UserError
from async_rl.extensions.quickstart import init
from async_rl.launch import launch as launch_module
from async_rl.launch.supervisor import Death, Outcome
from async_rl.run.directory import RunDir

ROWS = [{"prompt": "1+1:", "gt_answer": "2"}]


@pytest.fixture
def ends_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outcome], None]:
    """Let a run have no processes, and end at once with an outcome."""

    def replace(outcome: Outcome) -> None:
        class Ends:
            def __init__(self, commands: Any, run_dir: RunDir, **options: object) -> None:
                self._run_dir = run_dir

            def run(self) -> Outcome:
                self._run_dir.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
                if not outcome.exit_code:
                    self._run_dir.mark_finished({"steps": 1})
                return outcome

        monkeypatch.setattr(launch_module, "Supervisor", Ends)

    monkeypatch.setattr(launch_module, "preflight", lambda config, **options: math.inf)
    replace(Outcome(0))
    return replace


def train(folder: Path, **sections: Any) -> async_rl.Run:
    return async_rl.train("tiny", run=folder / "run", quiet=True, **sections)


def test_a_finished_run_is_returned_and_the_same_call_returns_it_again(
    tmp_path: Path, ends_as: object, capsys: pytest.CaptureFixture[str]
):
    run = train(tmp_path)
    assert run.is_finished
    assert run.path == tmp_path / "run"
    assert run.config.model.path == "tiny"
    assert "next:" not in capsys.readouterr().out, "no commands in a program"
    train(tmp_path)
    assert "is finished; raise learner.steps to train on" in capsys.readouterr().out


def test_a_failed_run_raises_with_the_first_cause(tmp_path: Path, ends_as: Callable[[Outcome], None]):
    log = tmp_path / "learner-0.log"
    log.write_text("ValueError: the first cause\n")
    death = Death("learner-0", 1, log, 0, log.stat().st_size)
    ends_as(Outcome(1, str(death), (death,)))
    with pytest.raises(
        RunFailedError, match=r"first cause: learner-0 exited with code 1.*\n.*ValueError: the first"
    ) as e:
        train(tmp_path)
    assert not isinstance(e.value, UserError), "the user may be unable to correct it"


def test_ctrl_c_returns_the_run_with_what_to_do_and_sigterm_raises(
    tmp_path: Path, ends_as: Callable[[Outcome], None], capsys: pytest.CaptureFixture[str]
):
    ends_as(Outcome(130, "SIGINT"))
    assert not train(tmp_path).is_finished
    assert "the run was stopped by SIGINT; the same call starts over" in capsys.readouterr().out
    assert not train(tmp_path, fresh=True).is_finished  # the same call, or quickstart, would start over
    resumes = f"the run was stopped by SIGINT; `async-rl launch {tmp_path / 'run' / 'config.toml'}` starts over"
    assert resumes in capsys.readouterr().out
    ends_as(Outcome(143, "SIGTERM"))
    with pytest.raises(StoppedError, match="stopped by SIGTERM"):
        train(tmp_path)


def test_sections_that_a_call_leaves_out_have_the_sizes_of_init_which_are_shown_before_the_start(
    tmp_path: Path, ends_as: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(init, "num_gpus_here", lambda: 0)
    config = async_rl.train("tiny", ROWS, run=tmp_path / "a", sampling={"max_new_tokens": 8}).config
    assert (config.learner.steps, config.learner.groups_per_step, config.generator.batch_size) == (50, 4, 16)
    assert (config.sampling.max_new_tokens, config.sampling.group_size) == (8, 8), "what is passed is not guessed"
    assert "optimizer.lr = 1e-06; 50 steps of 32 answers of up to 8 tokens" in capsys.readouterr().out
    assert async_rl.train("tiny", ROWS, run=tmp_path / "b", config={}).config.learner == LearnerConfig()
    assert init.guessed_sizes("tiny", ())["learner"] == {"steps": 50, "groups_per_step": 4, "max_tokens": 4096}


def test_a_message_names_arguments_and_its_traceback_ends_in_the_call(
    tmp_path: Path, ends_as: object, monkeypatch: pytest.MonkeyPatch
):
    train(tmp_path)
    (tmp_path / "run" / "trained.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunError, match=r"with source .*, or start over with fresh=True") as refused:
        async_rl.train("other", run=tmp_path / "run")
    assert "--" not in str(refused.value)
    with pytest.raises(RunError, match=r"^source: expected a run directory") as refused:
        async_rl.train("tiny", run=tmp_path / "fork", source=str(tmp_path / "none"))
    functions = [frame.name for frame in traceback.extract_tb(refused.value.__traceback__)]
    assert functions == ["test_a_message_names_arguments_and_its_traceback_ends_in_the_call", "train"]
    with pytest.raises(ConfigError, match=r"expected model, data and run, got no model and no data; pass, say"):
        async_rl.train(run=tmp_path / "new")


def test_rows_are_in_the_new_directory_when_fresh_moves_the_old_one_aside(
    tmp_path: Path, ends_as: object, monkeypatch: pytest.MonkeyPatch
):
    checked: list[str] = []

    def preflight(config: Any, **options: object) -> float:
        checked.append(Path(config.data.train).read_text())
        return math.inf

    monkeypatch.setattr(launch_module, "preflight", preflight)
    first = train(tmp_path, data=ROWS)
    again = train(tmp_path, data=[{"prompt": "2+2:", "gt_answer": "4"}], fresh=True)
    assert [json.loads(text)["gt_answer"] for text in checked] == ["2", "4"]
    source = again.config.data.train
    assert isinstance(source, str)
    assert json.loads(Path(source).read_text())["gt_answer"] == "4"
    assert (tmp_path / "run.old-1" / "finished.json").exists()
    assert first.path == again.path


def test_a_refused_start_leaves_a_directory_that_the_next_call_takes(
    tmp_path: Path, ends_as: object, monkeypatch: pytest.MonkeyPatch
):
    def refuse(config: Any, **options: object) -> float:
        raise ConfigError("reward.type: the function raises")

    with monkeypatch.context() as patched:
        patched.setattr(launch_module, "preflight", refuse)
        with pytest.raises(ConfigError, match="the function raises"):
            train(tmp_path, data=ROWS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]
    assert train(tmp_path, data=ROWS).is_finished


def test_a_call_outside_the_main_thread_is_refused_before_anything_is_written(tmp_path: Path):
    raised: list[BaseException] = []

    def call() -> None:
        try:
            train(tmp_path)
        except RunError as error:
            raised.append(error)

    thread = threading.Thread(target=call, name="worker")
    thread.start()
    thread.join()
    assert "expected a call in the main thread, which gets Ctrl-C, got one in worker" in str(raised[0])
    assert not (tmp_path / "run").exists()
