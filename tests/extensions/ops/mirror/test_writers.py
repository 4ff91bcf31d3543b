"""Who may write to a mirror: a writer lives as long as its manifests move, by the clock of who watches."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.run import CheckpointConfig
from async_rl.errors import LineageError, RunError
from async_rl.extensions.ops.mirror import copier as copiers
from async_rl.extensions.ops.mirror import fetch as fetching
from async_rl.extensions.ops.mirror.copier import Copier
from async_rl.extensions.ops.mirror.fetch import SILENT_S, bring_back, check_mine
from async_rl.extensions.ops.mirror.store import Store
from async_rl.run.directory import RunDir
from tests.extensions.ops.mirror.runs import (
    URL,
    Clock,
    begun,
    config_of,
    copied,
    fetched_from_mirror,
    ignore,
    manifest_at,
    mirrored_run,
    objects,
    save,
)


def test_who_ends_while_another_one_waits_leaves_the_mirror_to_it(tmp_path: Path, clock: Clock):
    copy = copied(tmp_path, mirrored_run(tmp_path))
    writer = begun(RunDir(tmp_path / "run"))
    clock.meanwhile = lambda: writer.sync(is_last=True)
    assert check_mine(Store(URL), copy, CheckpointConfig(), ignore) == manifest_at()
    assert clock.now == fetching._LOOK_S
    # What it wrote in the end counts, too: it may have gone further.
    writer = begun(copy)
    other = copied(tmp_path / "again", copy)
    clock.meanwhile = lambda: (save(copy, 6), writer.sync(is_last=True))
    with pytest.raises(RunError, match="up to step-000006"):
        check_mine(Store(URL), other, CheckpointConfig(), ignore)


def test_a_writer_that_wakes_up_at_the_last_moment_keeps_its_mirror(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    copy = copied(tmp_path, mirrored_run(tmp_path))
    writer, real = begun(RunDir(tmp_path / "run")), copiers.check_mine

    def check_and_wake(*arguments: Any) -> Any:
        found = real(*arguments)
        save(RunDir(tmp_path / "run"), 6)
        assert writer.sync()
        return found

    monkeypatch.setattr(copiers, "check_mine", check_and_wake)
    with pytest.raises(LineageError, match="has taken over"):
        begun(copy)
    assert clock.now == SILENT_S
    save(RunDir(tmp_path / "run"), 8)
    assert writer.sync()
    assert manifest_at().latest == "step-000008"


def test_of_two_that_begin_at_once_one_finds_it_before_it_removes_anything(tmp_path: Path, clock: Clock):
    mirrored_run(tmp_path)
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    for run in (first, second):
        bring_back(config_of(run.path), fresh=False, show=ignore)
        save(run, 6, run.path.name)
    copiers_of = [Copier(run, Store(URL), CheckpointConfig(), files_every_s=0.0) for run in (first, second)]
    real, has_begun = Store.write, list[Copier]()

    def write(self: Store, name: str, data: bytes) -> None:
        """While the first writes its first manifest, the second does so, too."""
        if not has_begun:
            has_begun.append(copiers_of[1])
            with contextlib.suppress(LineageError):
                copiers_of[1].begin(ignore)
        real(self, name, data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "write", write)
        with contextlib.suppress(LineageError):
            copiers_of[0].begin(ignore)
    winner = manifest_at().process
    lost, won = sorted(copiers_of, key=lambda copier: copier._manifest.process == winner)
    before = objects()
    with pytest.raises(LineageError, match="has taken over memory://bucket/run"):
        lost.sync()
    assert {*before} <= {*objects()}, "what the loser copied is left over"
    assert won.sync()
    assert manifest_at().process == winner
    name = fetched_from_mirror(tmp_path / "third")
    assert (tmp_path / "third" / "checkpoints" / name / "hf" / "config.json").read_text() in {
        "step-000006first", "step-000006second",
    }  # fmt: skip
    listed = {stored.object for stored in manifest_at().files.values()}
    assert {*objects()} == {*listed, manifest_at().name}


def test_the_same_directory_goes_on_at_once_and_another_one_watches(tmp_path: Path, clock: Clock):
    run = mirrored_run(tmp_path)
    bring_back(config_of(run.path), fresh=False, show=ignore)
    assert begun(run).sync()
    assert clock.now == 0
    copy = copied(tmp_path, run)
    bring_back(config_of(copy.path), fresh=False, show=ignore)
    assert clock.now == SILENT_S
    assert begun(copy).sync()
    assert clock.now == SILENT_S, "it was seen to be dead"
    # A writer that lives makes a manifest a minute. Which host, process and time it names does not matter.
    writer = begun(copy)
    clock.meanwhile = lambda: clock.now % copiers.BEAT_S or writer._commit()
    before = clock.now
    with pytest.raises(
        RunError, match=r"process \d+ on .* writes to memory://bucket/run; stop it, or name another URL"
    ):
        bring_back(config_of(tmp_path / "new"), fresh=False, show=ignore)
    assert clock.now == before + copiers.BEAT_S
