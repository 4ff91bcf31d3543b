"""Who may use a mirror: the table of docs/reliability.md, row by row, with a kill before every change of the store."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace

from async_rl.errors import UserError
from async_rl.extensions.ops.mirror import fetch as fetching
from async_rl.extensions.ops.mirror.fetch import SILENT_S, bring_back
from async_rl.extensions.ops.mirror.manifest import update_status
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.mirror import is_complete
from async_rl.run.directory import RunDir
from async_rl.run.reuse import check_run_dir
from tests.extensions.ops.mirror.runs import (
    URL,
    Clock,
    Killed,
    begun,
    config_of,
    copied,
    ignore,
    kill_before,
    make_run,
    manifest_at,
    mirrored_run,
    objects,
    rows_of,
    save,
)

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
    copy = copied(path, mirrored_run(path))
    shutil.rmtree(copy.checkpoints / S4)
    (copy.checkpoints / "latest").write_text(S2)
    return copy


def unfinished_copy(path: Path) -> RunDir:
    copy = copied(path, mirrored_run(path, is_finished=True))
    copy.finished_marker.unlink()
    return copy


def continued_elsewhere(path: Path) -> RunDir:
    run, other = mirrored_run(path, has_ended=True), RunDir(path / "other")
    bring_back(config_of(other.path), fresh=False, show=ignore)
    save(other, 6)
    assert begun(other).sync(is_last=True)
    return run


def strange_manifest(path: Path) -> RunDir:
    run = mirrored_run(path)
    for name in Store(URL).names("manifests"):
        Store(URL).remove([name])
    strange = manifest_of({"step-4": 5})
    Store(URL).write(*strange)
    return run


def manifest_of(files: Any, **changes: Any) -> tuple[str, bytes]:
    """The name and the content of a manifest that somebody made by hand."""
    content = {
        "number": 7, "run_id": "run-a", "directory": "d", "host": "h", "pid": 1, "process": "p", "has_ended": True,
        "files": files, **changes,
    }  # fmt: skip
    data = json.dumps(content).encode()
    return f"manifests/000007-{xxhash.xxh3_128_hexdigest(data)}.json", data


STARTS = {
    "nothing": Start(lambda path: (run := make_run(path / "run"), save(run, 4))[0], None, S4),
    "this directory's run": Start(mirrored_run, None, S4),
    "a run, and `run.dir` is empty": Start(
        lambda path: (mirrored_run(path), RunDir(path / "new"))[1], None, S4, SILENT_S
    ),
    "this run up to a step that `run.dir` has, and `run.dir` is a copy or a backup": Start(
        lambda path: copied(path, mirrored_run(path)), None, S4, SILENT_S
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
        lambda path: (mirrored_run(path), make_run(path / "b", "run-b"))[1], "expected the run run-b of .*/b", S4
    ),
    "a run that another process writes to now": Start(
        lambda path: (mirrored_run(path), RunDir(path / "new"))[1], r"process \d+ on .* writes to memory://bucket", S4,
        2 * SILENT_S / 2,
    ),
    "a manifest that no version of async-rl wrote": Start(
        strange_manifest, "of another version of async-rl, or made by", None
    ),
}  # fmt: skip


def test_the_table_has_these_rows():
    assert rows_of("One writer") == [*STARTS]


@pytest.mark.parametrize("name", STARTS)
def test_no_kill_of_a_start_changes_who_may_use_the_mirror(
    tmp_path: Path, name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
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
                with kill_before(attempt):
                    check_run_dir(config_of(run.path), fresh=False)
                    bring_back(config_of(run.path), fresh=False, show=ignore)
                    assert begun(run).sync()
                assert row.words is None
            except UserError as error:
                refusal = str(error)
                assert row.words is not None, refusal
                assert re.search(row.words, refusal), refusal
            except Killed:
                killed = True
            now = dict(MemoryFileSystem.store)
            assert all(now.get(key) is before[key] for key in before if "/checkpoints/" in key)
            if row.words is not None and not clock.now:
                assert now == before
        assert row.latest is None or manifest_at().latest == row.latest
        if not killed:
            # A writer that was seen to be dead is not waited for again, and one that lives is seen in half that time.
            assert clock.now == row.waits_s
            break


def write_another_manifest() -> None:
    manifest = replace(manifest_at(), number=manifest_at().number + 1)
    Store(URL).write(manifest.name, manifest.encoded)


def test_a_removed_object_is_missed_at_the_next_start_of_a_complete_run(tmp_path: Path):
    run = mirrored_run(tmp_path, has_ended=True, is_finished=True)
    config = config_of(run.path)
    # A checkpoint of which a file is gone counts as gone. It has three files.
    for lost, number in (("metrics.jsonl", 1), (S2, 3), ("manifests", "all")):
        update_status(run.path, is_complete=True)
        assert bring_back(config, fresh=False, show=ignore) == []
        assert is_complete(config)
        Store(URL).remove([name for name in objects() if lost in name][:1])
        assert bring_back(config, fresh=False, show=ignore) == [
            f"{URL} lacks {number} files of the run, which are copied now"
        ]
        assert not is_complete(config)
        assert begun(run).sync(is_last=True)
