"""The mirror of a run in an object store: what counts as copied, what is pruned, and how a run comes back."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

from async_rl.cli.main import main
from async_rl.config.run import CheckpointConfig
from async_rl.errors import ConfigError, RunError, StoreError, UserError
from async_rl.extensions.ops.mirror import copier as copiers
from async_rl.extensions.ops.mirror import passes
from async_rl.extensions.ops.mirror.copier import Copier
from async_rl.extensions.ops.mirror.fetch import bring_back, check_mine, check_mirror, fetch
from async_rl.extensions.ops.mirror.manifest import Manifest, Stored, newest_manifest, update_status
from async_rl.extensions.ops.mirror.passes import mirror_run
from async_rl.extensions.ops.mirror.store import Store, scrubbed
from async_rl.learner.checkpoints.digests import find_damage
from async_rl.learner.checkpoints.mirror import is_complete, mirror_line, read_status
from async_rl.learner.checkpoints.resume import find_resume_point
from async_rl.learner.loop.mirroring import MirrorPart
from async_rl.run.directory import RunDir
from async_rl.run.reuse import check_run_dir
from tests.extensions.ops.mirror import runs


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_run_comes_back_from_the_url_alone_without_journal_and_keys(tmp_path: Path, protocol: str):
    url = runs.URL if protocol == "memory" else f"file://{tmp_path}/bucket/run"
    run, other = runs.make_run(tmp_path / "run", 2), RunDir(tmp_path / "other")
    (run.rollouts / "rolled_back-1").mkdir(parents=True)
    (run.rollouts / "rolled_back-1" / "step-000001.jsonl").write_text("{}\n")
    copier = runs.begun(run, url)
    assert copier.sync(is_last=True)
    manifest = runs.manifest_at(url)
    assert (manifest.run_id, manifest.latest, manifest.has_ended) == ("run-a", "step-000002", True)
    assert not [name for name in runs.objects(url) if "keys" in name or "sqlite" in name]

    other.path.mkdir()
    lines = fetch(Store(url), manifest, other, runs.ignore)
    assert lines == [f"fetched the run from {url}: step-000002, which {manifest.writer} wrote"]
    assert runs.contents(other.path) == runs.contents(run.path)
    assert find_damage(other.checkpoints / "step-000002") == ""
    # The copy may go on with the mirror.
    assert check_mine(Store(url), other, CheckpointConfig(), runs.ignore) == manifest


def test_half_a_manifest_does_not_count(tmp_path: Path):
    run = runs.make_run(tmp_path / "run", 2)
    assert runs.begun(run).sync()
    whole, store = runs.manifest_at(), Store(runs.URL)
    later = Manifest(number=9, run_id="run-a", directory="d", host="h", pid=1, process="p", latest="step-000009")
    store.write(later.name, later.encoded[:-10])
    assert runs.manifest_at() == whole
    store.write(later.name, later.encoded)
    assert runs.manifest_at() == later


def test_what_the_store_damages_is_not_listed_and_is_copied_again(tmp_path: Path, monkeypatch):
    run = runs.make_run(tmp_path / "run", 2)
    copier, real, damaged = runs.begun(run), MemoryFileSystem.info, list[str]()

    def damage(self: MemoryFileSystem, path: str, **kwargs: Any) -> Any:
        """Flip a byte of the first object of the checkpoint that was written."""
        found = real(self, path, **kwargs)
        if not damaged and path.endswith("extra.msgpack"):
            damaged.append(path)
            file = MemoryFileSystem.store[path]
            file.seek(0)
            file.write(b"E")
        return found

    monkeypatch.setattr(MemoryFileSystem, "info", damage)
    with pytest.raises(StoreError, match=r"extra.msgpack: the copy differs from"):
        copier.sync()
    assert damaged
    assert newest_manifest(Store(runs.URL)) is None
    assert copier.sync()
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    fetch(Store(runs.URL), runs.manifest_at(), other, runs.ignore)
    assert find_damage(other.checkpoints / "step-000002") == ""


def test_only_files_that_changed_are_copied_again_and_an_early_finished_marker_is_left_out(tmp_path: Path, monkeypatch):
    run = runs.make_run(tmp_path / "run", 2)
    (run.path / "export").mkdir()
    (run.path / "export" / "model.safetensors").write_bytes(b"weights")
    copier = runs.begun(run)
    assert copier.sync()
    before = runs.manifest_at().files
    with run.metrics.open("a") as file:
        file.write('{"step": 3}\n')
    assert copier.sync()
    after = runs.manifest_at().files
    assert {name for name in after if after[name].object != before[name].object} == {"metrics.jsonl"}

    # The run ends between the look at `latest` and the copy of the files.
    real = Copier._copy_files

    def copy(self: Copier, whole: dict[str, Stored]) -> Any:
        if run.latest_checkpoint == "step-000002":
            runs.save(run, 4)
            run.finished_marker.write_text("{}")
        return real(self, whole)

    monkeypatch.setattr(Copier, "_copy_files", copy)
    assert not copier.sync()
    assert "finished.json" not in runs.manifest_at().files
    assert copier.sync()
    assert (runs.manifest_at().latest, "finished.json" in runs.manifest_at().files) == ("step-000004", True)


@pytest.mark.parametrize("slow", ["a copy", "a comparison"])
def test_a_process_gives_signs_of_life_while_it_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str):
    run, is_alive = runs.make_run(tmp_path / "run", 2), threading.Event()
    assert runs.begun(run).sync()
    before, copier = runs.manifest_at(), runs.begun(run)
    if slow == "a copy":
        runs.save(run, 4)
    place, name = (Store, "put") if slow == "a copy" else (copiers, "_entry_of")
    real = getattr(place, name)

    def wait(*arguments: Any) -> Any:
        """This file is read only after the next manifest."""
        assert is_alive.wait(20)
        return real(*arguments)

    def write(self: Store, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"bucket/run/{name}", data)
        is_alive.set()

    monkeypatch.setattr(place, name, wait)
    monkeypatch.setattr(Store, "write", write)
    monkeypatch.setattr(copiers, "BEAT_S", 0.05)
    assert copier.sync()
    assert runs.manifest_at().number >= before.number + 2
    assert runs.manifest_at().latest == run.latest_checkpoint
    assert (runs.manifest_at().files == before.files) == (slow == "a comparison")


def test_fresh_needs_an_empty_mirror_and_an_empty_one_is_no_run(tmp_path: Path):
    config = runs.config_of(tmp_path / "new")
    assert bring_back(config, fresh=False, show=runs.ignore) == []
    run = runs.make_run(tmp_path / "run", 2)
    assert runs.begun(run).sync(is_last=True)
    for options in ({"fresh": True}, {"fresh": False, "is_fork": True}):
        with pytest.raises(RunError, match="name another URL, or leave out --fresh and --from"):
            bring_back(config, show=runs.ignore, **options)
    assert not RunDir(Path(config.run.dir)).config.exists()


def test_a_store_that_is_down_refuses_a_new_run_and_lets_a_run_here_go_on(tmp_path: Path, monkeypatch):
    run = runs.make_run(tmp_path / "run")

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ConnectionError("no route")

    for call in ("pipe_file", "find"):
        monkeypatch.setattr(MemoryFileSystem, call, fail)
    here, new = runs.config_of(run.path), runs.config_of(tmp_path / "new")
    assert bring_back(here, fresh=False, show=runs.ignore) == []
    assert "ConnectionError: no route; it is tried again while the run goes" in check_mirror(here)
    with pytest.raises(StoreError, match="ConnectionError: no route"):
        bring_back(new, fresh=False, show=runs.ignore)
    with pytest.raises(StoreError, match="ConnectionError: no route"):
        check_mirror(new)
    monkeypatch.undo()
    assert check_mirror(new) == ""
    assert runs.objects() == []


def test_the_process_outlives_an_outage_says_so_and_copies_all_before_it_ends(tmp_path: Path, monkeypatch):
    run = runs.make_run(tmp_path / "run", 2)
    finish, calls, real = threading.Event(), list[str](), MemoryFileSystem.pipe_file

    def fail_twice(self: MemoryFileSystem, path: str, value: bytes, **kwargs: Any) -> Any:
        calls.append(path)
        if len(calls) <= 2:
            raise ConnectionError("no route")
        finish.set()
        return real(self, path, value, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail_twice)
    monkeypatch.setattr("async_rl.extensions.ops.mirror.passes._LOOK_S", 0.01)
    assert mirror_run(run, CheckpointConfig(mirror=runs.URL), finish)
    assert runs.manifest_at().has_ended
    assert is_complete(runs.config_of(run.path))
    first, last = run.notes.read_text().splitlines()
    assert first.startswith("the mirror fails, and is tried again")
    assert last.startswith("the mirror works again")
    assert mirror_line(run) == f"{runs.URL} has step-000002"


def test_who_reads_compares_with_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = runs.make_run(tmp_path / "run", 2)
    update_status(run.path, url=runs.URL, latest="step-000002")
    assert mirror_line(run) == f"{runs.URL} has step-000002"
    runs.save(run, 141)
    monkeypatch.setattr(passes.time, "time", lambda: (run.path / "mirror.json").stat().st_mtime + 61)
    assert mirror_line(run) == f"{runs.URL} has step-000002, 139 steps behind, 1m01s after its last sign of life"
    assert MirrorPart(run).record(None) == {"mirror/behind_steps": 139}  # pyright: ignore[reportArgumentType]
    for damaged in (b"", b"[]", b"{", b'{"url": 5}', b'{"url": "x", "latest": 5}'):
        (run.path / "mirror.json").write_bytes(damaged)
        assert (read_status(run.path).url, mirror_line(run)) == ("", "")
        assert MirrorPart(run).record(None) == {"mirror/behind_steps": 141}  # pyright: ignore[reportArgumentType]


def test_a_mirror_that_hangs_is_told_of_once_until_it_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, ended = runs.make_run(tmp_path / "run", 3), threading.Event()
    update_status(run.path, url=runs.URL, latest="step-000001")
    clock = itertools.count(step=passes._HANGS_S / 2 + 1)
    monkeypatch.setattr(passes, "mirror_run", lambda *_: not ended.wait(20))
    monkeypatch.setattr(passes.time, "monotonic", lambda: float(next(clock)))
    said: list[str] = []
    mirror = passes.StoreMirror(run, CheckpointConfig(mirror=runs.URL, mirror_wait_s=0.01), said.append)
    for error in ("", "it answers, and hangs again"):
        update_status(run.path, error=error)
        for _ in range(5):
            mirror.look()
    first, second = run.notes.read_text().splitlines()
    assert first.startswith(f"the mirror has not answered for a while: {runs.URL} has step-000001, 2 steps behind")
    assert second.endswith("it answers, and hangs again")
    assert not mirror.finish()
    ended.set()
    assert "checkpoint.mirror_wait_s" in said[0]
    assert said[1].endswith("; the same command copies the rest")


def test_the_end_does_not_wait_for_what_waiting_can_not_mend(tmp_path: Path):
    run, finish = runs.mirrored_run(tmp_path), threading.Event()
    runs.save(run, 6)
    (run.checkpoints / "step-000006" / "extra.msgpack").write_bytes(b"")
    finish.set()
    assert not mirror_run(run, CheckpointConfig(mirror=runs.URL), finish)
    assert not is_complete(runs.config_of(run.path))
    assert runs.manifest_at().has_ended
    words = "the checkpoint step-000006 is damaged, or was removed: "
    assert run.notes.read_text().startswith(f"the run is not mirrored: {words}")
    assert words in mirror_line(run)


def test_a_process_that_was_replaced_says_so_and_ends(tmp_path: Path):
    run, other = runs.make_run(tmp_path / "run", 2), RunDir(tmp_path / "other")
    assert runs.begun(run).sync(is_last=True)
    bring_back(runs.config_of(other.path), fresh=False, show=runs.ignore)
    assert runs.begun(other).sync()
    runs.save(run, 4)
    assert not mirror_run(run, CheckpointConfig(mirror=runs.URL), threading.Event())
    assert "has continued the run in memory://bucket/run from another directory" in mirror_line(run)


def test_a_learner_without_a_whole_checkpoint_is_told_that_the_mirror_has_one(tmp_path: Path):
    run = runs.make_run(tmp_path / "run", 2)
    update_status(run.path, url=runs.URL, latest="step-000002")
    (run.checkpoints / "step-000002" / "extra.msgpack").write_bytes(b"")
    words = (
        f"The mirror {runs.URL} has step-000002; to go on from there, name an empty run.dir. Put back an undamaged copy"
    )
    with pytest.raises(RunError, match=words):
        find_resume_point(run.path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/path", "expected a URL such as s3://bucket/path"),
        ("s3://key:hunter2@bucket/path", r"without user, password .* got s3://\*\*\*@bucket/path"),
        ("abfs://c/path?sig=hunter2", "without user, password .* got abfs://c/path"),
    ],
)
def test_a_url_that_is_none_or_has_secrets_is_refused_without_showing_them(
    tmp_path: Path, url: str, words: str, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "run.toml"
    config.write_text('run = { dir = "d" }\nmodel = { path = "m" }\ndata = { train = "t" }\nlearner = { steps = 1 }\n')
    with pytest.raises(SystemExit, match="2"):
        main(["config", str(config), "--set", f"checkpoint.mirror={url}"])
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(words, said), said
    assert "hunter2" not in said


def test_a_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch):
    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"pip install 'async-rl\[s3\]'"):
        Store("s3://bucket/path")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="expected a URL that fsspec knows"):
        Store("nosuch://bucket/path")


def test_errors_show_no_credentials(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    text = scrubbed("403 for https://x/y?X-Amz-Signature=abc123&part=1 with wJalrXUtnFEMI\n token: hunter2hunter2")
    assert text == "403 for https://x/y?X-Amz-Signature=***&part=1 with *** token: ***"


WHOLE: dict[str, Any] = {
    "number": 7, "run_id": "run-a", "directory": "d", "host": "h", "pid": 1, "process": "p", "has_ended": True,
}  # fmt: skip
EMPTY = [0, "99aa06d3014798d86001c324468d497f"]
"""Size and digest of an empty file."""


def write(content: Any, number: int = 7) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    Store(runs.URL).write(f"manifests/{number:06d}-{xxhash.xxh3_128_hexdigest(data)}.json", data)


def of_files(*names: str, entry: Any = EMPTY, name: str = "files/1/x", **changes: Any) -> dict[str, Any]:
    """A manifest with these files, whose object is empty."""
    Store(runs.URL).write("files/1/x", b"")
    return {**WHOLE, "files": {one: {"entry": entry, "object": name} for one in names}, **changes}


STRANGE: dict[str, Any] = {
    "no JSON": b"{", "no text": b'{"run_id": "\xff"}', "a key is missing": {"number": 7},
    "lists 100,000 deep": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an infinite number": json.dumps(WHOLE).replace("7", "1e400").encode(),
    "a number of 5,000 digits": json.dumps(WHOLE).replace("7", "7" * 5000).encode(),
    "another number than its name": {**WHOLE, "number": 8}, "files are a list": {**WHOLE, "files": []},
    "a size is negative": of_files("run_id", entry=[-1, EMPTY[1]]), "an empty name": of_files(""),
    "an absolute name": of_files("/etc/passwd"), "a name that leads out": of_files("rollouts/../../x"),
    "a name that leads nowhere": of_files("rollouts/./x"), "a folder's name": of_files("rollouts/"),
    "a name of no run": of_files("queue.json"), "a folder of a name of no run": of_files("queue/index"),
    "names 600 deep": of_files("rollouts/" + "a/" * 600 + "x"), "a part of 300 bytes": of_files("eval/" + "ü" * 150),
    "a null byte": of_files("rollouts/a\0b"), "a checkpoint without files": of_files("checkpoints/step-000004"),
    "a file that is a folder": of_files("config.toml/x"), "an object elsewhere": of_files("run_id", name="../../x"),
    "a file below a file": of_files("eval/a", "eval/a/b"), "nothing": WHOLE,
    "another run's id": of_files("run_id", "config.toml"),
    "an object that is gone": of_files("config.toml", "run_id", name="files/2/x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_a_manifest_made_by_hand_is_refused_in_one_line_and_the_directory_stays_usable(tmp_path: Path, kind: str):
    of_files()
    write(STRANGE[kind])
    run, config = RunDir(tmp_path / "run"), runs.config_of(tmp_path / "run")
    for _ in range(2):
        check_run_dir(config, fresh=False)
        with pytest.raises(UserError) as caught:
            bring_back(config, fresh=False, show=runs.ignore)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700
        assert not run.config.exists()
    # With the real run in the same place, all is well.
    for name in Store(runs.URL).names("manifests"):
        Store(runs.URL).remove([name])
    real = runs.make_run(tmp_path / "real")
    runs.save(real, 2)
    assert runs.begun(real).sync(is_last=True)
    bring_back(config, fresh=False, show=runs.ignore)
    assert run.latest_checkpoint == "step-000002"


def test_every_file_that_a_mirror_gets_is_taken_back(tmp_path: Path):
    run = runs.make_run(tmp_path / "run", 2)
    deep = run.export / "/".join("d" * 60)
    deep.mkdir(parents=True)
    (deep / ("x" * 255)).write_text("x")
    for name in ("logger_id", "nonfinite/step-000001.pt", "metrics.rolled_back-1.jsonl", "trained.damaged-2.jsonl"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("x")
    assert runs.begun(run).sync(is_last=True)
    other = RunDir(tmp_path / "other")
    bring_back(runs.config_of(other.path), fresh=False, show=runs.ignore)
    assert (other.path / (deep / ("x" * 255)).relative_to(run.path)).read_text() == "x"
    assert (other.path / "trained.damaged-2.jsonl").exists()


def test_the_newest_manifest_and_checkpoint_are_those_with_the_highest_number(tmp_path: Path):
    run = runs.make_run(tmp_path / "run")
    for step in (999_999, 1_000_000):
        runs.save(run, 1)
        (run.checkpoints / "step-000001").rename(run.checkpoints / f"step-{step}")
        (run.checkpoints / "latest").write_text(f"step-{step}")
        assert runs.begun(run).sync()
    assert runs.manifest_at().latest == "step-1000000"
    for number in (999_999, 1_000_000):
        write({**WHOLE, "number": number}, number)
    assert runs.manifest_at().number == 1_000_000


def test_a_manifest_that_can_t_be_read_back_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = runs.make_run(tmp_path / "run", 2)
    copier, real = runs.begun(run), Store.names
    assert copier.sync()

    def fail(self: Store, folder: str) -> list[str]:
        if folder == "manifests" and len(real(self, folder)) > 1:  # the new one is written
            raise StoreError("no route")
        return real(self, folder)

    runs.save(run, 4)
    monkeypatch.setattr(Store, "names", fail)
    with pytest.raises(StoreError):
        copier.sync()
    monkeypatch.undo()
    for step in range(6, 12):  # of whatever digest
        runs.save(run, step)
        assert copier.sync()
        assert runs.manifest_at().latest == f"step-{step:06d}"


def test_a_manifest_that_is_replaced_meanwhile_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = runs.make_run(tmp_path / "run", 2)
    copier, real = runs.begun(run), Store.read
    assert copier.sync()

    def read(self: Store, name: str) -> bytes | None:
        """The writer replaces the manifest between the list of names and this."""
        monkeypatch.undo()
        runs.save(run, 4)
        assert copier.sync()
        return real(self, name)

    monkeypatch.setattr(Store, "read", read)
    assert runs.manifest_at().latest == "step-000004"
    # A name that never has an object is an error.
    monkeypatch.setattr(Store, "read", lambda *_: None)
    with pytest.raises(StoreError, match="names without any"):
        newest_manifest(Store(runs.URL))
