"""What a mirror keeps: the table of docs/reliability.md, row by row, with a kill before every change of the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from async_rl.errors import StoreError
from async_rl.extensions.ops.mirror.fetch import bring_back
from async_rl.extensions.ops.mirror.manifest import checkpoints_in, update_status
from async_rl.extensions.ops.mirror.rules import folder_of
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.mirror import mirror_line, read_status
from async_rl.run.directory import RunDir
from tests.extensions.ops.mirror import runs


def damage(checkpoint: Path) -> None:
    (checkpoint / "extra.msgpack").write_bytes(b"EXTRA")


def go_back(run: RunDir, damaged: str, latest: str) -> None:
    """Do what a learner does with a damaged checkpoint."""
    (run.checkpoints / damaged).rename(run.checkpoints / f"{damaged}.damaged-1")
    (run.checkpoints / "latest").write_text(f"{latest}\n")


def prune(run: RunDir, name: str) -> None:
    shutil.rmtree(run.checkpoints / name)


@dataclass
class Row:
    """What a run does after its mirror has the steps 2 and 4, and what must be so at any time, and in the end.

    Attributes:
        changes: each is done to the run directory, and then a pass is made.
        config: of ``[checkpoint]``.
        stay: objects of these checkpoints are in the store at any time.
        newest: a fetch has one of these at any time.
        listed, kept: names in the last manifest, and folders without their digests.
        told: part of ``notes.log``, if there was no kill.
        lacking: beginning of why the mirror does not have all in the end.
    """

    changes: list[Callable[[RunDir], object]]
    stay: set[str]
    newest: set[str]
    listed: list[str]
    kept: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    told: str = ""
    lacking: str = ""


S2, S4, S6 = "step-000002", "step-000004", "step-000006"


def remove_objects(run: RunDir) -> None:
    """Somebody removes an object of each checkpoint, of which the run has one."""
    names = [name for name in runs.objects() if name.endswith("extra.msgpack")]
    if run.latest_checkpoint == S4 and len(names) == 2:
        Store(runs.URL).remove(names)
        prune(run, S2)


def save_once(step: int, content: str = "") -> Callable[[RunDir], None]:
    def change(run: RunDir) -> None:
        if not (run.checkpoints / f"step-{step:06d}").exists():
            runs.save(run, step, content)

    return change


def save_damaged(run: RunDir) -> None:
    save_once(6)(run)
    damage(run.checkpoints / S6)


def went_back(run: RunDir) -> None:
    if not (run.checkpoints / f"{S4}.damaged-1").exists():
        go_back(run, S4, S2)


def made_again(run: RunDir) -> None:
    """The run goes back and comes as far again between two passes."""
    if not list(run.checkpoints.glob("*.old")):
        (run.checkpoints / S4).rename(run.checkpoints / "4.old")
        runs.save(run, 4, "other")


REMOVAL = {
    "one of the newest `checkpoint.keep_last`, or a multiple of `keep_every`": Row(
        [save_once(6)], {S2, S4}, {S4, S6}, [S2, S4, S6], config={"every": 2, "keep_last": 2, "keep_every": 2}
    ),
    "older than these, once a newer one is complete": Row(
        [save_once(6)], {S4}, {S4, S6}, [S4, S6], config={"keep_last": 2}
    ),
    "newer than all in `run.dir`, because the newest there was damaged": Row(
        [went_back, save_once(6)], {S4}, {S4, S6}, [S2, S6], [S4],
    ),
    "of a step that the run has made again since": Row(
        [made_again], {S4}, {S4}, [S2, S4], [S4]
    ),
    "any, while the newest in `run.dir` is damaged": Row(
        [save_damaged], {S2, S4}, {S4}, [S2, S4], lacking="the checkpoint step-000006 is damaged, or was removed: /"
    ),
    "one of which somebody removed an object": Row(
        [remove_objects], set(), {S4}, [S4], [S2], told="the mirror lost 6 files, such as checkpoints/step-000002/"
    ),
}  # fmt: skip


def test_the_table_has_these_rows():
    assert runs.rows_of("What is removed") == [*REMOVAL]


@pytest.mark.parametrize("name", REMOVAL)
def test_no_kill_removes_what_the_rules_keep(tmp_path: Path, name: str):
    row = REMOVAL[name]
    number, killed, done = -1, True, list[str]()
    while killed:
        MemoryFileSystem.store.clear()
        number += 1
        run = runs.make_run(tmp_path / f"run-{number}")
        for step in (2, 4):
            runs.save(run, step)
            runs.begun(run).sync()
        whole = {key: file.getvalue() for key, file in MemoryFileSystem.store.items()}
        folders = {one: folder_of(run.checkpoints / one) for one in row.stay}
        kept = [f"/bucket/run/checkpoints/{folder}/" for folder in folders.values()]
        killed = False
        for change in row.changes:
            change(run)
            try:
                with runs.kill_before(number) as done:
                    runs.begun(run, **row.config).sync()
            except runs.Killed:
                killed = True
            now = {key: file.getvalue() for key, file in MemoryFileSystem.store.items()}
            assert {key for key in whole if key.startswith(tuple(kept))} <= now.keys(), done
            assert all(now[key] == whole[key] for key in whole.keys() & now.keys())
            if row.stay:
                assert runs.fetched_from_mirror(tmp_path / "elsewhere") in row.newest, done
        copier = runs.begun(run, **row.config)
        copier.sync(is_last=True)
        assert list(checkpoints_in(runs.manifest_at().files)) == row.listed
        assert [folder.rpartition("-")[0] for folder in runs.manifest_at().kept] == row.kept
        assert copier.num_kept == len(row.kept)
        listed = {stored.object for stored in runs.manifest_at().files.values()}
        of_kept = tuple(f"checkpoints/{folder}/" for folder in runs.manifest_at().kept)
        there = {one for one in runs.objects() if not one.startswith(of_kept or "-")}
        assert there == {*listed, runs.manifest_at().name} or row.lacking
        assert copier.lacking.startswith(row.lacking)
        assert killed or row.told in (run.notes.read_text() if run.notes.exists() else "")
    assert number > 5


def test_a_mirror_that_is_newer_stays_so_until_the_user_gives_up_what_the_run_lost(tmp_path: Path):
    run = runs.mirrored_run(tmp_path)
    before = runs.manifest_at()
    went_back(run)
    copier = runs.begun(run)
    assert not copier.sync(is_last=True)
    assert "name an empty run.dir" in copier.lacking
    assert copier.lacking.endswith("--set checkpoint.mirror_may_lose=4")
    after = runs.manifest_at()
    assert (copier.num_kept, after.files, after.latest, after.has_ended) == (1, before.files, S4, True)
    # The learner makes the step again.
    runs.save(run, 4, "other")
    copier = runs.begun(run, mirror_may_lose=3)
    assert copier.sync()
    update_status(run.path, num_kept=copier.num_kept)
    assert mirror_line(run).endswith(", and keeps 1 that the run lost (checkpoint.mirror_may_lose)")
    (kept,) = runs.manifest_at().kept
    assert runs.begun(run, mirror_may_lose=4).sync()
    assert runs.manifest_at().kept == ()
    assert not [one for one in runs.objects() if kept in one]


def test_what_the_user_gives_up_at_once_is_not_kept(tmp_path: Path):
    run = runs.mirrored_run(tmp_path)
    went_back(run)
    assert runs.begun(run, mirror_may_lose=4).sync(is_last=True)
    assert (runs.manifest_at().latest, runs.manifest_at().kept) == (S2, ())


def test_a_fetch_leaves_out_what_is_broken_and_the_run_goes_on_with_the_mirror(tmp_path: Path):
    def lose(step: str) -> None:
        Store(runs.URL).remove(name for name in runs.objects() if step in name and name.endswith("extra.msgpack"))

    runs.mirrored_run(tmp_path, has_ended=True)
    lose(S4)
    other, last = RunDir(tmp_path / "other"), RunDir(tmp_path / "last")
    warning, _ = bring_back(runs.config_of(other.path), fresh=False, show=runs.ignore)
    assert "the mirror's checkpoint step-000004 is left out" in warning
    assert other.latest_checkpoint == S2
    copier = runs.begun(other)
    assert copier.sync(is_last=True)
    assert (runs.manifest_at().latest, copier.num_kept) == (S2, 1)
    assert read_status(other.path).place
    lose(S2)
    with pytest.raises(StoreError, match="no checkpoint of the run"):
        bring_back(runs.config_of(last.path), fresh=False, show=runs.ignore)
    assert not last.config.exists()
