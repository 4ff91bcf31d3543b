"""Manifests that no version of async-rl wrote are refused in one line, and leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from async_rl.errors import StoreError, UserError
from async_rl.extensions.ops.mirror.fetch import bring_back
from async_rl.extensions.ops.mirror.manifest import newest_manifest
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.mirror import mirror_line, read_status
from async_rl.run.directory import RunDir
from async_rl.run.reuse import check_run_dir
from tests.extensions.ops.mirror.runs import URL, begun, config_of, ignore, make_run, manifest_at, save

WHOLE: dict[str, Any] = {
    "number": 7, "run_id": "run-a", "directory": "d", "host": "h", "pid": 1, "process": "p", "has_ended": True,
}  # fmt: skip
EMPTY = [0, "99aa06d3014798d86001c324468d497f"]
"""Size and digest of an empty file."""


def write(content: Any, number: int = 7) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    Store(URL).write(f"manifests/{number:06d}-{xxhash.xxh3_128_hexdigest(data)}.json", data)


def of_files(*names: str, entry: Any = EMPTY, name: str = "files/1/x", **changes: Any) -> dict[str, Any]:
    """A manifest with these files, whose object is empty."""
    Store(URL).write("files/1/x", b"")
    return {**WHOLE, "files": {one: {"entry": entry, "object": name} for one in names}, **changes}


STRANGE: dict[str, Any] = {
    "no JSON": b"{", "no object": [], "a number": 5, "no text": b'{"run_id": "\xff"}',
    "lists 100,000 deep": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a key is missing": {"number": 7}, "a key has another type": {**WHOLE, "run_id": 5},
    "an infinite number": json.dumps(WHOLE).replace("7", "1e400").encode(),
    "a negative number": {**WHOLE, "number": -7}, "another number than its name": {**WHOLE, "number": 8},
    "a number of 5,000 digits": json.dumps(WHOLE).replace("7", "7" * 5000).encode(),
    "files are a list": {**WHOLE, "files": []}, "a size is negative": of_files("run_id", entry=[-1, EMPTY[1]]),
    "a size is text": of_files("run_id", entry=["0", EMPTY[1]]), "an empty name": of_files(""),
    "an absolute name": of_files("/etc/passwd"), "a name that leads out": of_files("rollouts/../../x"),
    "a name that leads nowhere": of_files("rollouts/./x"), "an empty part": of_files("rollouts//x"),
    "a folder's name": of_files("rollouts/"), "a name of no run": of_files("queue.json"),
    "a file of a name of no run": of_files("mirror.json"), "a folder of a name of no run": of_files("queue/index"),
    "names 600 deep": of_files("rollouts/" + "a/" * 600 + "x"), "a part of 300 bytes": of_files("eval/" + "ü" * 150),
    "a null byte": of_files("rollouts/a\0b"), "a checkpoint without files": of_files("checkpoints/step-000004"),
    "a checkpoint without a number": of_files("checkpoints/best/x"), "checkpoints alone": of_files("checkpoints"),
    "a file that is a folder": of_files("config.toml/x"), "an object elsewhere": of_files("run_id", name="../../x"),
    "an object of no folder": of_files("run_id", name="x"), "a file below a file": of_files("eval/a", "eval/a/b"),
    "no config": of_files("run_id"), "nothing": WHOLE, "another run's id": of_files("run_id", "config.toml"),
    "an object that is gone": of_files("config.toml", "run_id", name="files/2/x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_a_manifest_made_by_hand_is_refused_in_one_line_and_the_directory_stays_usable(tmp_path: Path, kind: str):
    of_files()
    write(STRANGE[kind])
    run, config = RunDir(tmp_path / "run"), config_of(tmp_path / "run")
    for _ in range(2):
        check_run_dir(config, fresh=False)
        with pytest.raises(UserError) as caught:
            bring_back(config, fresh=False, show=ignore)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700
        assert not run.config.exists()
    # With the real run in the same place, all is well.
    for name in Store(URL).names("manifests"):
        Store(URL).remove([name])
    real = make_run(tmp_path / "real")
    save(real, 2)
    assert begun(real).sync(is_last=True)
    bring_back(config, fresh=False, show=ignore)
    assert run.latest_checkpoint == "step-000002"


def test_every_file_that_a_mirror_gets_is_taken_back(tmp_path: Path):
    run = make_run(tmp_path / "run")
    save(run, 2)
    deep = run.export / "/".join("d" * 60)
    deep.mkdir(parents=True)
    (deep / ("x" * 255)).write_text("x")
    for name in ("wandb_id", "nonfinite/step-000001.pt", "metrics.rolled_back-1.jsonl", "trained.damaged-2.jsonl"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("x")
    assert begun(run).sync(is_last=True)
    other = RunDir(tmp_path / "other")
    bring_back(config_of(other.path), fresh=False, show=ignore)
    assert (other.path / (deep / ("x" * 255)).relative_to(run.path)).read_text() == "x"
    assert (other.path / "trained.damaged-2.jsonl").exists()


def test_the_newest_manifest_and_checkpoint_are_those_with_the_highest_number(tmp_path: Path):
    run = make_run(tmp_path / "run")
    for step in (999_999, 1_000_000):
        save(run, 1)
        (run.checkpoints / "step-000001").rename(run.checkpoints / f"step-{step}")
        (run.checkpoints / "latest").write_text(f"step-{step}")
        assert begun(run).sync()
    assert manifest_at().latest == "step-1000000"
    for number in (999_999, 1_000_000):
        write({**WHOLE, "number": number}, number)
    newest = newest_manifest(Store(URL))
    assert newest is not None
    assert newest.number == 1_000_000


def test_a_manifest_that_was_half_committed_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run")
    save(run, 2)
    copier = begun(run)
    assert copier.sync()
    real = Store.names

    def fail(self: Store, folder: str) -> list[str]:
        if folder == "manifests" and any("000002" in name for name in real(self, folder)):
            monkeypatch.undo()
            raise StoreError("no route")
        return real(self, folder)

    # It is written, but can't be read back; then others are written, of whatever digest.
    monkeypatch.setattr(Store, "names", fail)
    save(run, 4)
    with pytest.raises(StoreError):
        copier.sync()
    for step in range(6, 12):
        save(run, step)
        assert copier.sync()
        assert manifest_at().latest == f"step-{step:06d}"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"url": 5}', b'{"url": "x", "latest": 5}', b'{"url": "x", "num_kept": "many"}']
)
def test_a_damaged_mirror_json_says_nothing(tmp_path: Path, content: bytes):
    (tmp_path / "mirror.json").write_bytes(content)
    assert read_status(tmp_path).url == ""
    assert mirror_line(RunDir(tmp_path)) == ""


def test_a_manifest_that_is_replaced_while_it_is_read_is_no_empty_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(tmp_path / "run")
    save(run, 2)
    copier, real = begun(run), Store.read
    assert copier.sync()

    def read(self: Store, name: str) -> bytes | None:
        """The writer replaces the manifest between the list of names and this."""
        monkeypatch.undo()
        save(run, 4)
        assert copier.sync()
        return real(self, name)

    monkeypatch.setattr(Store, "read", read)
    assert manifest_at().latest == "step-000004"
    # A name that never has an object is an error.
    monkeypatch.setattr(Store, "read", lambda *_: None)
    with pytest.raises(StoreError, match="names without any"):
        newest_manifest(Store(URL))
