"""The run directory: who may enter, what may differ, what is moved aside."""

import json
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import load_config, parse_config
from async_rl.errors import RunError
from async_rl.run.directory import check_run_dir, prepare_run_dir


def a_config(directory: Path, **sections: dict[str, object]) -> Config:
    raw = {"run": {"dir": str(directory)}, "model": {"path": "tiny"}, **sections}
    return parse_config(raw, "test")


def test_preparing_writes_the_resolved_config_and_doing_it_twice_changes_nothing(tmp_path: Path):
    config = a_config(tmp_path / "run")
    run_dir = prepare_run_dir(config)
    written = run_dir.config.stat().st_mtime_ns
    assert load_config(run_dir.config) == config
    prepare_run_dir(config)
    assert run_dir.config.stat().st_mtime_ns == written


def test_checking_writes_nothing(tmp_path: Path):
    check_run_dir(a_config(tmp_path / "run"), fresh=True)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_config_is_refused_with_exactly_the_keys_that_differ(tmp_path: Path):
    prepare_run_dir(a_config(tmp_path / "run"))
    changed = a_config(tmp_path / "run", optimizer={"lr": 0.5}, sampling={"group_size": 3}, generator={"count": 7})
    with pytest.raises(RunError) as refused:
        prepare_run_dir(changed)
    message = str(refused.value)
    assert "optimizer.lr: 1e-06 -> 0.5" in message
    assert "sampling.group_size: 8 -> 3" in message
    assert "generator.count" not in message
    assert "--fresh" in message


def test_what_does_not_change_the_training_may_differ_and_is_written_down(tmp_path: Path):
    run_dir = prepare_run_dir(a_config(tmp_path / "run"))
    moved = a_config(
        tmp_path / "run", generator={"count": 3}, learner={"nproc": 2}, log={"wandb": "offline"}, sft={"steps": 2},
        queue={"journal_dir": str(tmp_path / "journal")}, data={"on_change": "accept"},
    )  # fmt: skip
    prepare_run_dir(moved)
    assert load_config(run_dir.config) == moved


def test_fresh_moves_the_old_run_aside_even_with_a_changed_config(tmp_path: Path):
    old = prepare_run_dir(a_config(tmp_path / "run"))
    old.metrics.write_text('{"step": 1}\n')
    for number in (1, 2):
        run_dir = prepare_run_dir(a_config(tmp_path / "run", optimizer={"lr": 0.1 * number}), fresh=True)
        assert not run_dir.metrics.exists()
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "run.old-2" / "config.toml").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_of_other_things_is_refused_and_left_as_it_is(tmp_path: Path, fresh: bool):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match=r"thesis\.txt"):
        prepare_run_dir(a_config(tmp_path), fresh=fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_directory_where_only_the_queue_server_was_is_entered(tmp_path: Path):
    (tmp_path / "queue.json").write_text("{}")
    (tmp_path / "queue").mkdir()
    assert prepare_run_dir(a_config(tmp_path)).config.exists()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="expected a directory"):
        prepare_run_dir(a_config(tmp_path / "run"))


def test_a_directory_that_cannot_be_made_is_a_run_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't write"):
        prepare_run_dir(a_config(tmp_path / "file" / "run"))


def test_a_config_of_another_version_is_refused_with_its_cause(tmp_path: Path):
    (tmp_path / "config.toml").write_text("[run]\ndir = 'x'\nold_key = 1\n[model]\npath = 'x'\n")
    with pytest.raises(RunError, match=r"(?s)can't read.*run\.old_key: unknown key"):
        prepare_run_dir(a_config(tmp_path))


def test_the_finished_marker_keeps_its_facts(tmp_path: Path):
    run_dir = prepare_run_dir(a_config(tmp_path / "run"))
    assert not run_dir.is_finished
    run_dir.mark_finished({"step": 5, "elapsed_s": 1.5})
    again = prepare_run_dir(a_config(tmp_path / "run"))
    assert again.is_finished
    assert json.loads(again.finished_marker.read_text()) == {"step": 5, "elapsed_s": 1.5}
