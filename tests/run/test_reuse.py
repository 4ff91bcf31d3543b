"""The run directory: which config may use it, what may differ, what is moved aside."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError, RunError
from async_rl.process.user_code import write_digests
from async_rl.run.directory import RunDir
from async_rl.run.lock import locked_run_dir
from async_rl.run.reuse import check_place, check_run_dir, check_shared, has_ended, prepare_run_dir, shared_values
from tests.config.made import a_config


def test_checking_writes_nothing_and_preparing_the_resolved_config_once(tmp_path: Path):
    config = a_config(tmp_path / "run")
    check_run_dir(config, fresh=True)
    assert list(tmp_path.iterdir()) == []
    run_dir = prepare_run_dir(config)
    written = run_dir.config.stat().st_mtime_ns
    assert load_config(run_dir.config) == config
    prepare_run_dir(config)
    assert run_dir.config.stat().st_mtime_ns == written


def test_the_config_of_a_moved_run_is_refused_unless_the_command_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = a_config(tmp_path / "run")
    run_dir = prepare_run_dir(config)
    # It may be reached by a link, and another config may lie anywhere.
    (tmp_path / "link").symlink_to(run_dir.path)
    monkeypatch.chdir(tmp_path)
    check_place(config, run_dir.config, [])
    check_place(a_config(Path("link")), run_dir.config, [])
    check_place(a_config(Path("run")), Path("link/config.toml"), [])
    check_place(a_config(tmp_path / "other"), run_dir.path / "mine.toml", [])
    check_place(a_config(tmp_path / "other"), tmp_path / "config.toml", [])
    moved = run_dir.path.rename(tmp_path / "moved here")
    with pytest.raises(
        ConfigError, match=rf"run\.dir: expected {moved}, .* got {tmp_path / 'run'}; .* --set run.dir='"
    ):
        check_place(config, moved / "config.toml", ["learner.steps=9"])
    check_place(config, moved / "config.toml", [f"run.dir={moved}"])


def trained(config: Config, steps: int = 2) -> RunDir:
    """A run that has made ``steps`` steps and has a checkpoint of the last one, as far as these rules look."""
    run_dir = prepare_run_dir(config)
    run_dir.metrics.write_text('{"step": 1}\n')
    run_dir.trained.write_text('{"step": 1}\n')
    (run_dir.checkpoints / f"step-{steps:06d}").mkdir(parents=True)
    (run_dir.checkpoints / "latest").write_text(f"step-{steps:06d}\n")
    return run_dir


JUDGE = {"endpoint": "http://127.0.0.1:8000/v1", "model": "judge"}
MOVED_JUDGE = {
    **JUDGE, "endpoint": "http://10.0.0.2:9000/v1", "api_key_env": "KEY", "timeout_s": 5.0, "max_concurrent": 2,
    "cache": "verdicts.sqlite",
}  # fmt: skip
GAE = {"loss": {"advantage": "gae"}}


def test_a_changed_config_is_refused_with_exactly_the_keys_that_differ(tmp_path: Path):
    trained(a_config(tmp_path / "run", **GAE, reward={"type": "judge", "judge": JUDGE}))
    changed = a_config(
        tmp_path / "run", loss={"advantage": "gae", "clip_high": 0.5}, sampling={"group_size": 3},
        generator={"count": 7}, queue={"max_staleness": 7}, critic={"gamma": 0.5},
        reward={"type": "judge", "judge": {**MOVED_JUDGE, "model": "other"}},
    )  # fmt: skip
    with pytest.raises(RunError) as refused:
        prepare_run_dir(changed)
    found = re.findall(r"^  (\S+): (.*)$", str(refused.value), re.MULTILINE)
    assert dict(found) == {
        "loss.clip_high": "0.28 -> 0.5", "sampling.group_size": "8 -> 3", "critic.gamma": "1.0 -> 0.5",
        "reward.judge.model": "'judge' -> 'other'",
    }  # fmt: skip
    assert f"--from {tmp_path / 'run'}" in str(refused.value)
    assert "--fresh" in str(refused.value)
    with pytest.raises(RunError, match=r"max_staleness: 4 -> 7"):  # where nothing may change from now on
        check_run_dir(changed, fresh=False, tunable=())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # From now on.
        ({}, {"learner": {"steps": 500}}),
        ({}, {"queue": {"max_staleness": 16, "on_stale": "drop"}}),
        ({}, {"optimizer": {"lr": 0.5, "schedule": "cosine"}}),
        (GAE, {**GAE, "critic": {"lr": 1e-4, "schedule": "cosine", "min_lr_ratio": 0.2, "warmup_steps": 3}}),
        ({}, {"eval": {"every": 3}, "data": {"eval": {"test": "rows.jsonl"}}}),
        ({}, {"generator": {"kv_after_update": "recompute", "count": 2}}),
        ({}, {"data": {"epochs": 3, "curriculum": {"solved_at": 1.0}}}),
        # A service that grades may move.
        ({"reward": {"type": "judge", "judge": JUDGE}}, {"reward": {"type": "judge", "judge": MOVED_JUDGE}}),
        ({"reward": {"type": "code"}}, {"reward": {"type": "code", "code": {"endpoint": "http://a:1", "workers": 2}}}),
        # What does not change the training.
        ({}, {"learner": {"nproc": 2}, "checkpoint": {"every": 3}, "queue": {"journal_dir": "/elsewhere"}}),
        ({}, {"log": {"to": ["wandb"], "wandb_mode": "offline"}, "sft": {"steps": 2}, "data": {"on_change": "accept"}}),
    ],
)
def test_a_run_that_made_steps_takes_changes_and_writes_them_down(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
):
    trained(a_config(tmp_path / "run", **before))
    changed = a_config(tmp_path / "run", **after)
    assert load_config(prepare_run_dir(changed).config) == changed


def test_changed_code_is_refused_by_name_unless_it_is_accepted_and_never_asks_a_finished_run(tmp_path: Path):
    source = tmp_path / "mine.py"
    source.write_text("def score(item): return 1.0\n")

    def config(**run: str) -> Config:
        return a_config(tmp_path / "run", reward={"type": f"{source}:score"}, run={"dir": str(tmp_path / "run"), **run})

    run_dir = prepare_run_dir(config())
    write_digests(run_dir.path, config().recorded_code_names)
    source.write_text("def score(item): return -1.0\n")
    check_run_dir(config(), fresh=False)  # it has made no step
    trained(config())
    with pytest.raises(RunError, match=rf"(?s){source}:score: '\w{{16}}' -> '\w{{16}}'.*run\.on_code_change=accept"):
        check_run_dir(config(), fresh=False)
    check_run_dir(config(), fresh=True)
    check_run_dir(config(on_code_change="accept"), fresh=False)
    run_dir.mark_finished({"step": 1})
    check_run_dir(config(), fresh=False)


def test_fewer_steps_than_are_trained_are_refused(tmp_path: Path):
    trained(a_config(tmp_path / "run", learner={"steps": 9}), steps=6)
    check_run_dir(a_config(tmp_path / "run", learner={"steps": 6}), fresh=False)
    with pytest.raises(RunError, match=r"learner\.steps: expected at least 6, the steps .* got 5"):
        check_run_dir(a_config(tmp_path / "run", learner={"steps": 5}), fresh=False)


def test_a_finished_run_goes_on_if_it_gets_more_steps_or_epochs(tmp_path: Path):
    run_dir = trained(a_config(tmp_path / "run", learner={"steps": 2}, data={"epochs": 1}))
    run_dir.mark_finished({"step": 2, "elapsed_s": 1.5})
    assert json.loads(run_dir.finished_marker.read_text()) == {"step": 2, "elapsed_s": 1.5}
    same = a_config(tmp_path / "run", learner={"steps": 2}, data={"epochs": 1}, queue={"max_staleness": 9})
    assert has_ended(run_dir, same)
    for more in ({"learner": {"steps": 3}, "data": {"epochs": 1}}, {"learner": {"steps": 2}, "data": {"epochs": 2}}):
        assert not has_ended(run_dir, a_config(tmp_path / "run", **more))
    extended = a_config(tmp_path / "run", learner={"steps": 3}, data={"epochs": 1})
    prepare_run_dir(extended)
    assert not run_dir.is_finished
    assert load_config(run_dir.config) == extended


def test_a_run_to_which_no_learner_attached_takes_any_config_in_place(tmp_path: Path):
    run_dir = prepare_run_dir(a_config(tmp_path / "run"))
    run_id = run_dir.run_id
    (run_dir.path / "queue").mkdir()
    corrected = a_config(tmp_path / "run", sampling={"group_size": 3}, data={"train": "other.jsonl"})
    prepare_run_dir(corrected)
    assert load_config(run_dir.config) == corrected
    assert run_dir.run_id == run_id
    run_dir.config.write_text("of another version")
    prepare_run_dir(corrected)
    assert load_config(run_dir.config) == corrected


def test_a_run_that_made_no_step_is_moved_aside_for_another_config(tmp_path: Path):
    run_dir = prepare_run_dir(a_config(tmp_path / "run"))
    run_id = run_dir.run_id
    run_dir.metrics.touch()
    run_dir.trained.touch()
    locked(a_config(tmp_path / "run"))
    assert run_dir.run_id == run_id, "the same config resumes it"
    locked(a_config(tmp_path / "run", queue={"max_staleness": 9}))
    assert run_dir.run_id == run_id, "changes that apply from now on need no new run"
    locked(a_config(tmp_path / "run", sampling={"group_size": 3}))
    assert run_dir.run_id != run_id
    assert not run_dir.metrics.exists()
    assert (tmp_path / "run.old-1" / "run_id").read_text().strip() == run_id


def locked(config: Config, *, fresh: bool = False) -> RunDir:
    """Prepare the run directory as ``launch`` does."""
    with locked_run_dir(config, role="launch", fresh=fresh) as (run_dir, _):
        return run_dir


def test_fresh_moves_the_old_run_aside_even_with_a_changed_config(tmp_path: Path):
    old = prepare_run_dir(a_config(tmp_path / "run"))
    old.metrics.write_text('{"step": 1}\n')
    for number in (1, 2):
        run_dir = locked(a_config(tmp_path / "run", optimizer={"lr": 0.1 * number}), fresh=True)
        assert not run_dir.metrics.exists()
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "run.old-2" / "config.toml").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_of_other_things_is_refused_and_left_as_it_is(tmp_path: Path, fresh: bool):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    for path, message in (
        (tmp_path, r"thesis\.txt"),
        (thesis, "expected a directory"),
        (thesis / "run", "can't write"),
    ):
        with pytest.raises(RunError, match=message):
            locked(a_config(path), fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_directory_where_only_the_queue_server_was_is_entered(tmp_path: Path):
    (tmp_path / "queue.json").write_text("{}")
    for name in ("queue", "queue.old-1", "queue.old-2"):  # as `async-rl queue --fresh` leaves them
        (tmp_path / name).mkdir()
    assert prepare_run_dir(a_config(tmp_path)).config.exists()


def test_a_config_of_another_version_is_refused_with_its_cause(tmp_path: Path):
    trained(a_config(tmp_path))
    (tmp_path / "config.toml").write_text("[run]\ndir = 'x'\nold_key = 1\n[model]\npath = 'x'\n")
    with pytest.raises(RunError, match=r"(?s)can't read.*run\.old_key: unknown key"):
        prepare_run_dir(a_config(tmp_path))


def test_a_queue_server_with_another_config_than_the_learner_is_named(tmp_path: Path):
    server = a_config(tmp_path, queue={"max_staleness": 4, "address": "tcp://127.0.0.1:5555"}, generator={"count": 2})
    check_shared(a_config(tmp_path, queue={"max_staleness": 4}, loss={"clip_high": 0.5}), shared_values(server))
    with pytest.raises(ConfigError, match=r"(?s)server -> learner.*queue\.max_staleness: 4 -> 1\n"):
        check_shared(a_config(tmp_path, queue={"max_staleness": 1}), shared_values(server))
