"""Who may use a mirror: the table of docs/reliability.md, row by row, with a kill before every change of the store."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace

from async_rl.config.run import CheckpointConfig
from async_rl.errors import LineageError, RunError, UserError
from async_rl.extensions.ops.mirror import fetch as fetching
from async_rl.extensions.ops.mirror.copier import Copier
from async_rl.extensions.ops.mirror.fetch import SILENT_S, bring_back, check_mine
from async_rl.extensions.ops.mirror.manifest import update_status
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.mirror import is_complete
from async_rl.run.directory import RunDir
from async_rl.run.reuse import check_run_dir
from tests.extensions.ops.mirror import runs
from tests.extensions.ops.mirror.test_mirror import STRANGE, write

S2, S4, S6 = "step-000002", "step-000004", "step-000006"


@dataclass
class Start:
    """A mirror, and a run directory that would use it.

    Attributes:
        prepare: makes both below a path, and returns the directory that starts.
        words: what the refusal says; None if it goes on.
        latest: the newest checkpoint of the mirror in the end.
        waits_s: how long it watches the mirror.
    """

    prepare: Callable[[Path], RunDir]
    words: str | None
    latest: str | None
    waits_s: float = 0.0


def older_copy(path: Path) -> RunDir:
    copy = runs.copied(path, runs.mirrored_run(path))
    shutil.rmtree(copy.checkpoints / S4)
    (copy.checkpoints / "latest").write_text(S2)
    return copy


def unfinished_copy(path: Path) -> RunDir:
    copy = runs.copied(path, runs.mirrored_run(path, is_finished=True))
    copy.finished_marker.unlink()
    return copy


def continued_elsewhere(path: Path) -> RunDir:
    run, other = runs.mirrored_run(path, has_ended=True), RunDir(path / "other")
    bring_back(runs.config_of(other.path), fresh=False, show=runs.ignore)
    runs.save(other, 6)
    assert runs.begun(other).sync(is_last=True)
    return run


def strange_manifest(path: Path) -> RunDir:
    run = runs.mirrored_run(path)
    for name in Store(runs.URL).names("manifests"):
        Store(runs.URL).remove([name])
    write(STRANGE["files are a list"])
    return run


STARTS = {
    "nothing": Start(lambda path: runs.make_run(path / "run", 4), None, S4),
    "this directory's run": Start(runs.mirrored_run, None, S4),
    "a run, and `run.dir` is empty": Start(
        lambda path: (runs.mirrored_run(path), RunDir(path / "new"))[1], None, S4, SILENT_S
    ),
    "this run up to a step that `run.dir` has, and `run.dir` is a copy or a backup": Start(
        lambda path: runs.copied(path, runs.mirrored_run(path)), None, S4, SILENT_S
    ),
    "this run up to a newer step than `run.dir`": Start(
        older_copy,
        r"has the run up to step-000004, and .*/copy, which may be a copy or a backup, up to step-000002; to go on "
        r"from the mirror, name an empty run.dir; .* --set checkpoint.mirror_may_lose=4$", S4,
    ),
    "this run, finished, and `run.dir` is an unfinished copy": Start(
        unfinished_copy, r"has the finished run up to step-000004, and .*/copy, .* checkpoint.mirror_may_lose=4$", S4
    ),
    "this run, continued from another directory": Start(
        continued_elsewhere, "from another directory, up to step-000006", S6
    ),
    "another run": Start(
        lambda path: (runs.mirrored_run(path), runs.make_run(path / "b", run_id="run-b"))[1],
        "expected the run run-b of .*/b", S4
    ),
    "a run that another process writes to now": Start(
        lambda path: (runs.mirrored_run(path), RunDir(path / "new"))[1],
        r"process \d+ on .* writes to memory://bucket", S4, SILENT_S,
    ),
    "a manifest that no version of async-rl wrote": Start(
        strange_manifest, "of another version of async-rl, or made by", None
    ),
}  # fmt: skip


def test_the_table_has_these_rows():
    assert runs.rows_of("One writer") == [*STARTS]


@pytest.mark.parametrize("name", STARTS)
def test_no_kill_of_a_start_changes_who_may_use_the_mirror(
    tmp_path: Path, name: str, clock: runs.Clock, monkeypatch: pytest.MonkeyPatch
):
    row = STARTS[name]
    monkeypatch.setattr(fetching, "_LOOK_S", SILENT_S / 2)
    if name == "a run that another process writes to now":
        clock.meanwhile = write_another_manifest
    for number in itertools.count():
        MemoryFileSystem.store.clear()
        path = tmp_path / str(number)
        path.mkdir()
        run = row.prepare(path)
        before, clock.now, killed = dict(MemoryFileSystem.store), 0.0, False
        for attempt in (number, -1):
            try:
                with runs.kill_before(attempt):
                    check_run_dir(runs.config_of(run.path), fresh=False)
                    bring_back(runs.config_of(run.path), fresh=False, show=runs.ignore)
                    assert runs.begun(run).sync()
                assert row.words is None
            except UserError as error:
                refusal = str(error)
                assert row.words is not None, refusal
                assert re.search(row.words, refusal), refusal
            except runs.Killed:
                killed = True
            now = dict(MemoryFileSystem.store)
            assert all(now.get(key) is before[key] for key in before if "/checkpoints/" in key)
            if row.words is not None and not clock.now:
                assert now == before
        assert row.latest is None or runs.manifest_at().latest == row.latest
        if not killed:
            # A writer that was seen to be dead is not waited for again, and one that lives is seen in half that time.
            assert clock.now == row.waits_s
            break


def write_another_manifest() -> None:
    manifest = replace(runs.manifest_at(), number=runs.manifest_at().number + 1)
    Store(runs.URL).write(manifest.name, manifest.encoded)


def test_a_removed_object_is_missed_at_the_next_start_of_a_complete_run(tmp_path: Path):
    run = runs.mirrored_run(tmp_path, has_ended=True, is_finished=True)
    config = runs.config_of(run.path)
    # A checkpoint of which a file is gone counts as gone. It has three files.
    for lost, number in (("metrics.jsonl", 1), (S2, 3), ("manifests", "all")):
        update_status(run.path, is_complete=True)
        assert bring_back(config, fresh=False, show=runs.ignore) == []
        assert is_complete(config)
        Store(runs.URL).remove([name for name in runs.objects() if lost in name][:1])
        assert bring_back(config, fresh=False, show=runs.ignore) == [
            f"{runs.URL} lacks {number} files of the run, which are copied now"
        ]
        assert not is_complete(config)
        assert runs.begun(run).sync(is_last=True)


def test_who_ends_while_another_one_waits_leaves_the_mirror_to_it(tmp_path: Path, clock: runs.Clock):
    copy = runs.copied(tmp_path, runs.mirrored_run(tmp_path))
    writer = runs.begun(RunDir(tmp_path / "run"))
    clock.meanwhile = lambda: writer.sync(is_last=True)
    assert check_mine(Store(runs.URL), copy, CheckpointConfig(), runs.ignore) == runs.manifest_at()
    assert clock.now == fetching._LOOK_S
    # What it wrote in the end counts, too: it may have gone further.
    writer = runs.begun(copy)
    other = runs.copied(tmp_path / "again", copy)
    clock.meanwhile = lambda: (runs.save(copy, 6), writer.sync(is_last=True))
    with pytest.raises(RunError, match="up to step-000006"):
        check_mine(Store(runs.URL), other, CheckpointConfig(), runs.ignore)


def test_of_two_that_begin_at_once_one_finds_it_before_it_removes_anything(
    tmp_path: Path, clock: runs.Clock, monkeypatch: pytest.MonkeyPatch
):
    runs.mirrored_run(tmp_path)
    both = [RunDir(tmp_path / name) for name in ("first", "second")]
    for run in both:
        bring_back(runs.config_of(run.path), fresh=False, show=runs.ignore)
        runs.save(run, 6, run.path.name)
    first, second = (Copier(run, Store(runs.URL), CheckpointConfig(), files_every_s=0.0) for run in both)
    real = Store.write

    def write(self: Store, name: str, data: bytes) -> None:
        """While the first writes its first manifest, the second does so, too."""
        monkeypatch.undo()
        with contextlib.suppress(LineageError):
            second.begin(runs.ignore)
        real(self, name, data)

    monkeypatch.setattr(Store, "write", write)
    with contextlib.suppress(LineageError):
        first.begin(runs.ignore)
    winner, before = runs.manifest_at().process, runs.objects()
    lost, won = sorted((first, second), key=lambda copier: copier._manifest.process == winner)
    with pytest.raises(LineageError, match="has taken over memory://bucket/run"):
        lost.sync()
    assert {*before} <= {*runs.objects()}, "what the loser copied is left over"
    assert won.sync()
    assert runs.manifest_at().process == winner
    name = runs.fetched_from_mirror(tmp_path / "third")
    assert (tmp_path / "third" / "checkpoints" / name / "hf" / "config.json").read_text().startswith("step-000006")
    assert {*runs.objects()} == {
        *(stored.object for stored in runs.manifest_at().files.values()),
        runs.manifest_at().name,
    }
