"""Forks: a run goes on from a checkpoint of another run, in a directory of its own and with another config."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.errors import RunError, RunStoppedError
from async_rl.learner.checkpoints.digests import find_damage, renew_entry
from async_rl.learner.checkpoints.files import read_extra, write_extra
from async_rl.learner.checkpoints.fork import ForkPoint, find_fork_point, fork_run, must_fork, notes_on_models
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.run.directory import RunDir
from async_rl.run.reuse import prepare_run_dir
from tests.learner.loop.scripted_run import Run, all_wrong, make_run, retune
from tests.queue.builders import rows
from tests.refusal import refusal


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of 5 steps with checkpoints of the steps 2, 4 and 5."""
    run = make_run(tmp_path, checkpoint={"every": 2, "keep_last": 9})
    prepare_run_dir(run.config)
    run.start()
    return run


def forked(run: Run, directory: Path, *, digest: str = "", **sections: dict[str, object]) -> Run:
    """What ``launch --from RUN@2`` prepares: the directory, and a queue server with an empty queue."""
    fork = Run(run.config, run.queue_state)
    retune(fork, **{"run": {"dir": str(directory)}, **sections})
    prepare_run_dir(fork.config)
    stream = PromptStream(100, seed=0, shuffle=False)
    settings = QueueSettings.from_config(fork.config, vocab_size=None)
    fork.queue_state = QueueState(settings, rows(100), stream, data_digest=digest)
    point = find_fork_point(f"{run.path}@2")
    assert must_fork(point, fork.config, fresh=False)
    fork_run(point, fork.config)
    assert not must_fork(point, fork.config, fresh=False)
    return fork


def test_a_fork_goes_on_at_the_step_and_the_place_of_its_checkpoint_and_evaluates_first(run: Run, tmp_path: Path):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    fork = forked(run, tmp_path / "fork", learner={"steps": 6})
    checkpoint = fork.path / "checkpoints" / "step-000002"
    assert find_damage(checkpoint) == ""
    state = fork.start()
    assert (fork.steps, fork.evals) == ([3, 4, 5, 6], [2, 4, 6])
    assert state.version == 6
    assert fork.all_positions == list(range(4, 12))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    origin = json.loads((fork.path / "origin.json").read_text())
    assert origin == {"run_dir": str(run.path), "run_id": RunDir(run.path).run_id, "step": 2}


def test_a_fork_that_trains_nothing_is_no_success(run: Run, tmp_path: Path):
    # Its checkpoint has version 2, which its parent has trained.
    fork = forked(run, tmp_path / "fork", digest="of other rows", data={"train": "other.jsonl", "epochs": 1})
    PromptStream.__init__(fork.queue_state.stream, 100, seed=0, shuffle=False, epochs=1)
    fork.queue_state.stream.cursor = fork.queue_state.cursor
    with pytest.raises(RunStoppedError, match=r"trained nothing: .* prompts: 100 filtered"):
        fork.start(answer=all_wrong)


def test_a_fork_with_other_data_begins_at_its_first_prompt(run: Run, tmp_path: Path):
    fork = forked(run, tmp_path / "fork", digest="of other rows", data={"train": "other.jsonl"})
    fork.start()
    assert fork.steps == [3, 4, 5]
    assert fork.all_positions == list(range(6))


def test_files_are_linked_where_that_is_possible_and_copied_elsewhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def inodes(directory: Path) -> dict[str, int]:
        return {p.name: p.stat().st_ino for p in (directory / "checkpoints" / "step-000002").iterdir() if p.is_file()}

    source, own = inodes(run.path), {"extra.msgpack", "digests.json"}
    linked = inodes(forked(run, tmp_path / "linked").path)
    assert {name for name in source if linked[name] != source[name]} == own

    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied = forked(run, tmp_path / "copied")
    assert not set(inodes(copied.path).values()) & set(source.values())
    assert find_damage(copied.path / "checkpoints" / "step-000002") == ""


def test_an_interrupted_fork_is_made_again(run: Run, tmp_path: Path):
    config = forked(run, tmp_path / "fork").config
    (tmp_path / "fork" / "checkpoints" / "latest").unlink()
    (tmp_path / "fork" / "checkpoints" / ".partial-fork").mkdir()
    point = find_fork_point(f"{run.path}@2")
    assert must_fork(point, config, fresh=False)
    fork_run(point, config)
    assert find_damage(tmp_path / "fork" / "checkpoints" / "step-000002") == ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [("{run}@3", r"has a checkpoint \(2, 4, 5\), got 3"), ("{run}/nothing", "RUN@STEP"), ("{run}@2x", "RUN@STEP")],
)
def test_a_source_that_does_not_exist_is_refused(run: Run, source: str, expected: str):
    with pytest.raises(RunError, match=rf"--from: .*{expected}"):
        find_fork_point(source.format(run=run.path))
    latest = run.path / "checkpoints" / "step-000005"
    assert find_fork_point(str(run.path)) == ForkPoint(latest, RunDir(run.path).run_id)


def test_a_fork_into_the_directory_of_a_finished_run_is_refused_and_not_taken_for_done(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = make_run(tmp_path / "other")
    prepare_run_dir(other.config)
    other.start()
    RunDir(other.path).mark_finished({"step": 5})
    for command in (["launch"], ["launch", "--dry-run"], ["learner"]):
        said = refusal(capsys, *command, str(other.path / "config.toml"), "--from", f"{run.path}@2")
        assert "has a run that was not forked; choose another run.dir" in said


def rewrite_config(run: Run, config: Config) -> ForkPoint:
    """Let the checkpoint of step 2 be one of ``config``, as far as a fork looks before it copies."""
    point = find_fork_point(f"{run.path}@2")
    write_extra(point.checkpoint, {**read_extra(point.checkpoint), "config": config_to_toml(config)})
    renew_entry(point.checkpoint, "extra.msgpack")
    return point


def with_critic(config: Config, path: str | None = None) -> Config:
    gae = config.loss.model_copy(update={"advantage": "gae"})
    critic = config.critic.model_copy(update={"path": path})
    return config.model_copy(update={"loss": gae, "critic": critic})


def config_of_fork(run: Run, directory: Path, **sections: dict[str, object]) -> Config:
    fork = Run(run.config, run.queue_state)
    retune(fork, **{"run": {"dir": str(directory)}, **sections})
    prepare_run_dir(fork.config)
    return fork.config


def test_a_fork_goes_on_with_the_critic_of_its_checkpoint_or_is_refused(run: Run, tmp_path: Path):
    plain = config_of_fork(run, tmp_path / "fork")
    with pytest.raises(RunError, match=r"--from: expected the checkpoint of a run with a critic.*got .*step-000002"):
        fork_run(find_fork_point(f"{run.path}@2"), with_critic(plain))
    point = rewrite_config(run, with_critic(run.config, "runs/rm"))
    for other, named in (
        (with_critic(plain), r"critic\.path: expected 'runs/rm', .* got no value"),
        (with_critic(plain, "runs/other"), r"critic\.path: expected 'runs/rm', .* got 'runs/other'"),
    ):
        with pytest.raises(RunError, match=named):
            fork_run(point, other)
    assert RunDir(tmp_path / "fork").latest_checkpoint is None
    same = with_critic(plain, "runs/rm")
    assert notes_on_models(point, fork_run(point, same), same) == []


def test_a_fork_says_which_models_it_does_not_take_from_its_config(run: Run, tmp_path: Path):
    moves = {"kl_coef": 0.1, "kl_estimator": "k3", "reference_every": 2}
    config = config_of_fork(run, tmp_path / "fork", model={"path": "elsewhere"}, loss=moves)
    point = rewrite_config(run, with_critic(run.config))
    weights, reference, critic = notes_on_models(point, fork_run(point, config), config)
    assert weights.startswith(f"the trained weights are those of {point.checkpoint}; model.path gives")
    assert reference == "the reference is the model of model.path again, not one that has moved"
    assert critic == f"the critic of {point.checkpoint} is left out"


def test_a_fork_is_refused_where_it_cannot_go_on(run: Run, tmp_path: Path):
    point = find_fork_point(f"{run.path}@4")
    with pytest.raises(RunError, match=r"run\.dir: expected a directory other than that of the run"):
        must_fork(point, run.config, fresh=True)
    fork = forked(run, tmp_path / "fork")
    with pytest.raises(RunError, match=r"has a fork of .*run at step 2, not of .*run at step 4"):
        must_fork(point, fork.config, fresh=False)
    assert must_fork(point, fork.config, fresh=True)
    origin = RunDir(fork.path).origin
    content = origin.read_text()
    for text in ("{", "[]", "{}"):
        origin.write_text(text)
        with pytest.raises(RunError, match=r"can't read .*origin\.json.*leave out --from"):
            must_fork(point, fork.config, fresh=False)
    origin.write_text(content)
    retune(fork, learner={"steps": 4})
    with pytest.raises(RunError, match=r"learner\.steps: expected more than 4, .* got 4"):
        must_fork(point, fork.config, fresh=False)
