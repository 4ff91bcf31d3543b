"""Checkpoints are whole or not there, whenever the process dies. The engine here is a file and a moment to die."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from async_rl.config.run import CheckpointConfig
from async_rl.errors import LineageError, RunError
from async_rl.learner.checkpoints import files, writer
from async_rl.learner.checkpoints.files import latest_checkpoint, read_extra, reading, resolve_checkpoint, write_extra
from async_rl.learner.checkpoints.writer import CheckpointWriter, remove_leftovers
from async_rl.learner.interface import Engine
from tests.forked import Forked, preload
from tests.learner.saves_at_once import SavesAtOnce, write_checkpoint

preload("async_rl.learner.checkpoints.writer")


class FileEngine(SavesAtOnce):
    """Writes one file as its weights."""

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        (directory / "weights.bin").write_bytes(b"weights")
        write_extra(directory, extra)


class Owner:
    """The queue's word on the newest lineage. ``at(n, then)`` lets ``then`` happen before the ``n``-th question."""

    def __init__(self, lineage: str = "l1") -> None:
        self.lineage = lineage
        self._number = 0
        self._events: dict[int, Callable[[], None]] = {}

    def at(self, number: int, then: Callable[[], None]) -> None:
        self._events[number] = then

    def confirm(self, lineage: str) -> None:
        self._number += 1
        self._events.get(self._number, lambda: None)()
        if lineage != self.lineage:
            raise LineageError(f"{lineage} no longer owns the queue, {self.lineage} does")


def write(
    run_dir: Path, step: int, *, keep_last: int = 2, lineage: str = "l1", owner: Owner | None = None,
    engine: FileEngine | None = None, extra: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    confirm = partial((owner or Owner(lineage)).confirm, lineage)
    return write_checkpoint(
        engine or FileEngine(), run_dir, step, {"step": step} if extra is None else extra, keep_last=keep_last,
        lineage=lineage, confirm=confirm,
    )  # fmt: skip


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in sorted(run_dir.rglob("*")) if p.is_file()}


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_die(run_dir: Path, moment: str) -> None:
    """Commit step 1, then die inside the commit of step 2. Runs in a process of its own."""
    write(run_dir, 1)
    if moment == "saving":
        FileEngine.save = die
    else:
        # The commit's steps in order: flush, rename, flush, replace latest, prune.
        setattr(*{"renaming": (os, "rename", die), "replacing": (os, "replace", die),
                  "pruning": (writer, "_prune", die)}[moment])  # fmt: skip
    write(run_dir, 2)


@pytest.mark.parametrize(
    ("moment", "latest"),
    [("saving", "step-000001"), ("renaming", "step-000001"), ("replacing", "step-000001"), ("pruning", "step-000002")],
)
def test_a_kill_at_any_moment_leaves_a_whole_latest_and_the_next_start_cleans_up(
    tmp_path: Path, moment: str, latest: str
):
    assert Forked(write_and_die, tmp_path, moment).wait(60.0) == -signal.SIGKILL
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == latest
    assert (found / "weights.bin").read_bytes() == b"weights"
    assert read_extra(found) == {"step": int(latest[-1])}
    remove_leftovers(tmp_path)
    write(tmp_path, 3, keep_last=1, lineage="l2")
    assert names(tmp_path) == ["latest", "step-000003"]


def test_extra_comes_back_with_bytes_and_integer_keys_and_one_that_is_not_plain_commits_nothing(tmp_path: Path):
    extra = {"snapshot": b"\x00\xff", "digests": {3: "ab"}, "position": 17, "nested": [1, 2.5, None, "x"]}
    with pytest.raises(TypeError):
        write(tmp_path, 1, extra={"path": tmp_path})
    assert latest_checkpoint(tmp_path) is None
    assert read_extra(write(tmp_path, 2, extra=extra)) == extra


def test_the_newest_and_the_multiples_of_keep_every_are_kept(tmp_path: Path):
    config = CheckpointConfig(every=2, keep_last=2, keep_every=4, asynchronous=False)
    writer = CheckpointWriter(cast(Engine, FileEngine()), tmp_path, config, lineage="l1", confirm=lambda: None)
    for step in (2, 4, 6, 8, 9, 10):  # 9 is of a stop
        writer.begin(step, {})
        writer.poll()
    assert names(tmp_path) == ["latest", "step-000004", "step-000008", "step-000009", "step-000010"]
    for every in (0, 3):
        with pytest.raises(ValidationError, match=f"expected a multiple of checkpoint.every = {every}"):
            CheckpointConfig(every=every, keep_every=4)


def test_a_checkpoint_that_is_being_read_stays_until_the_next_commit_after_that(tmp_path: Path):
    write(tmp_path, 1, keep_last=1)
    with reading(tmp_path) as oldest:
        assert oldest.name == "step-000001"
        write(tmp_path, 2, keep_last=1)
        with reading(tmp_path) as newest:  # two readers, two checkpoints
            assert newest.name == "step-000002"
            write(tmp_path, 3, keep_last=1)
        assert names(tmp_path) == ["latest", "step-000001", "step-000002", "step-000003"]
        write(tmp_path, 4, keep_last=1)
        assert names(tmp_path) == ["latest", "step-000001", "step-000004"]
    write(tmp_path, 5, keep_last=1)
    assert names(tmp_path) == ["latest", "step-000005"]


def test_a_reader_of_a_run_whose_checkpoint_is_removed_meanwhile_gets_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, 1, keep_last=1)
    real = files.resolve_checkpoint

    def slow(path: Path) -> Path:
        found = real(path)
        if found.name == "step-000001":
            write(tmp_path, 2, keep_last=1)  # it removes step 1 after the reader has found it
        return found

    monkeypatch.setattr(files, "resolve_checkpoint", slow)
    with reading(tmp_path) as found:
        assert found.name == "step-000002"


def test_a_checkpoint_is_found_by_its_directory_its_run_or_its_latest(tmp_path: Path):
    target = write(tmp_path, 5)
    for path in (target, tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "latest"):
        assert resolve_checkpoint(path) == target


def test_a_checkpoint_that_is_not_there_or_is_there_already_is_refused(tmp_path: Path):
    target = write(tmp_path, 5)
    for path in (tmp_path / "nowhere", tmp_path / "checkpoints" / "step-000004"):
        with pytest.raises(RunError, match="expected a checkpoint"):
            resolve_checkpoint(path)
    with pytest.raises(RunError, match="expected a checkpoint beyond"):
        write(tmp_path, 5)
    (target / "extra.msgpack").write_bytes(b"\xc1")
    with pytest.raises(RunError, match=r"extra\.msgpack"):
        read_extra(target)
    (tmp_path / "checkpoints" / "latest").write_text("step-000006\n")
    with pytest.raises(RunError, match=r"'step-000006' \(it holds: step-000005\)"):
        latest_checkpoint(tmp_path)


# --- a learner that goes on after a newer one has taken over

NUM_QUESTIONS = 4
"""A commit asks before it begins, before the checkpoint gets its name, and twice before ``latest`` names it."""


def take_over(run_dir: Path, owner: Owner, steps: tuple[int, ...]) -> None:
    """What a newer learner does meanwhile: attach, clean up, and commit ``steps``."""
    owner.lineage = "l2"
    remove_leftovers(run_dir)
    for step in steps:
        write(run_dir, step, lineage="l2", keep_last=1)


@pytest.mark.parametrize("question", range(1, NUM_QUESTIONS + 1))
@pytest.mark.parametrize("steps", [(), (4,), (4, 6), (4, 6, 8)])
def test_an_older_learner_changes_no_checkpoint_of_its_successor(tmp_path: Path, question: int, steps: tuple[int, ...]):
    write(tmp_path, 2)
    owner, after = Owner(), dict[str, bytes]()

    def meanwhile() -> None:
        take_over(tmp_path, owner, steps)
        after.update(contents(tmp_path))

    owner.at(question, meanwhile)
    with pytest.raises(LineageError, match="l1 no longer owns the queue"):
        write(tmp_path, 4, owner=owner, keep_last=1)
    assert contents(tmp_path) == after
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == f"step-{max((2, *steps)):06d}"


@pytest.mark.parametrize("moment", ["rename", "replace"])
def test_a_takeover_after_the_last_question_still_keeps_the_older_learner_from_its_commit(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, 2)
    owner, after = Owner(), dict[str, bytes]()
    real = getattr(os, moment)

    def late(source: Path, target: Path) -> None:
        if not after:
            monkeypatch.undo()
            take_over(tmp_path, owner, (4,))
            after.update(contents(tmp_path))
        real(source, target)

    monkeypatch.setattr(os, moment, late)
    with pytest.raises(LineageError):
        write(tmp_path, 4, owner=owner)
    assert contents(tmp_path) == after


def test_an_older_learner_that_still_saves_ends_with_the_cause(tmp_path: Path):
    owner = Owner()

    class SlowEngine(FileEngine):
        def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
            super().save(directory, extra)
            take_over(tmp_path, owner, (1, 3))
            directory.mkdir()  # as PyTorch does before it writes
            (directory / "more.bin").write_bytes(b"more")

    with pytest.raises(LineageError):
        write(tmp_path, 1, owner=owner, engine=SlowEngine())
    assert names(tmp_path) == ["latest", "step-000003"]


def test_a_commit_removes_nothing_beyond_its_own_step_and_a_start_what_lies_beyond_latest(tmp_path: Path):
    remove_leftovers(tmp_path)  # of a new run
    write(tmp_path, 5)
    (tmp_path / "checkpoints" / "latest").unlink()
    (tmp_path / "checkpoints" / ".partial-l2-step-000006").mkdir()
    write(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == [".partial-l2-step-000006", "latest", "step-000003", "step-000005"]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["latest", "step-000003"]


def busy(*_: Path) -> None:
    raise OSError(errno.EBUSY, "Device or resource busy")


def test_a_checkpoint_that_can_not_be_removed_is_named_kept_and_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    kept = ".partial-removed-step-000001"
    write(tmp_path, 1, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(writer.shutil, "rmtree", busy)
        write(tmp_path, 2, keep_last=1)
        remove_leftovers(tmp_path)  # the next start, while it is still busy
    assert names(tmp_path) == [kept, "latest", "step-000002"]
    assert f"can't remove {tmp_path / 'checkpoints' / kept}: [Errno 16]" in caplog.text
    write(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["latest", "step-000003"]
