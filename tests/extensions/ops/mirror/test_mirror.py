"""The mirror of a run in an object store: what counts as copied, what is pruned, and how a run comes back."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from async_rl.cli.main import main
from async_rl.config.run import CheckpointConfig
from async_rl.errors import ConfigError, LineageError, RunError, StoreError
from async_rl.extensions.ops.mirror import copier as copiers
from async_rl.extensions.ops.mirror import passes
from async_rl.extensions.ops.mirror.copier import Copier
from async_rl.extensions.ops.mirror.fetch import bring_back, check_mine, check_mirror, fetch
from async_rl.extensions.ops.mirror.manifest import Manifest, Stored, checkpoints_in, newest_manifest, update_status
from async_rl.extensions.ops.mirror.passes import mirror_run
from async_rl.extensions.ops.mirror.store import Store, scrubbed
from async_rl.learner.checkpoints.digests import find_damage
from async_rl.learner.checkpoints.mirror import is_complete, mirror_line
from async_rl.learner.checkpoints.resume import find_resume_point
from async_rl.learner.loop.mirroring import MirrorPart
from async_rl.run.directory import RunDir
from tests.extensions.ops.mirror.runs import (
    URL,
    begun,
    config_of,
    contents,
    ignore,
    make_run,
    manifest_at,
    objects,
    save,
)


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_run_comes_back_from_the_url_alone_without_journal_and_keys(tmp_path: Path, protocol: str):
    url = URL if protocol == "memory" else f"file://{tmp_path}/bucket/run"
    run, other = make_run(tmp_path / "run"), RunDir(tmp_path / "other")
    save(run, 2)
    (run.rollouts / "rolled_back-1").mkdir(parents=True)
    (run.rollouts / "rolled_back-1" / "step-000001.jsonl").write_text("{}\n")
    copier = begun(run, url)
    assert copier.sync(is_last=True)
    manifest = manifest_at(url)
    assert (manifest.run_id, manifest.latest, manifest.has_ended) == ("run-a", "step-000002", True)
    assert not [name for name in objects(url) if "keys" in name or "sqlite" in name]

    other.path.mkdir()
    lines = fetch(Store(url), manifest, other, ignore)
    assert lines == [f"fetched the run from {url}: step-000002, which {manifest.writer} wrote"]
    assert contents(other.path) == contents(run.path)
    assert find_damage(other.checkpoints / "step-000002") == ""
    assert check_mine(Store(url), other, CheckpointConfig(), ignore) == manifest, "the copy may go on with the mirror"


def test_a_checkpoint_counts_only_with_its_manifest_and_a_kill_leaves_the_one_before(tmp_path: Path, monkeypatch):
    run, killed = make_run(tmp_path / "run"), list[str]()
    save(run, 2)
    assert begun(run).sync()
    save(run, 4)

    def die(point: str) -> None:
        killed.append(point)
        raise KeyboardInterrupt

    # The first object of the second checkpoint is copied, and the process dies.
    with monkeypatch.context() as patched:
        patched.setattr(copiers, "fault_point", die)
        with pytest.raises(KeyboardInterrupt):
            begun(run).sync()
    assert killed
    assert set(killed) == {"mirror.copied"}
    assert [name for name in objects() if "step-000004" in name], "something of it is there"
    assert manifest_at().latest == "step-000002"
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    fetch(Store(URL), manifest_at(), other, ignore)
    assert other.latest_checkpoint == "step-000002"

    # The next process goes on, and nothing is left over in the end.
    monkeypatch.setattr(copiers, "fault_point", ignore)
    assert begun(run, keep_last=1).sync()
    assert manifest_at().latest == "step-000004"
    assert sorted(objects()) == sorted([manifest_at().name, *(one.object for one in manifest_at().files.values())])


def test_half_a_manifest_does_not_count(tmp_path: Path):
    run = make_run(tmp_path / "run")
    save(run, 2)
    assert begun(run).sync()
    whole, store = manifest_at(), Store(URL)
    later = Manifest(number=9, run_id="run-a", directory="d", host="h", pid=1, process="p", latest="step-000009")
    store.write(later.name, later.encoded[:-10])
    assert manifest_at() == whole
    store.write(later.name, later.encoded)
    assert manifest_at() == later


def test_what_the_store_damages_is_not_listed_and_is_copied_again(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run")
    save(run, 2)
    copier, real, damaged = begun(run), MemoryFileSystem.info, list[str]()

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
    assert newest_manifest(Store(URL)) is None
    assert copier.sync()
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    fetch(Store(URL), manifest_at(), other, ignore)
    assert find_damage(other.checkpoints / "step-000002") == ""


def test_old_checkpoints_are_pruned_after_a_newer_one_is_complete(tmp_path: Path):
    run = make_run(tmp_path / "run")
    copier = None
    for step in (2, 4, 6, 8):
        save(run, step)
        copier = copier or begun(run, every=2, keep_last=2, keep_every=4)
        assert copier.sync()
    # The newest two are 6 and 8, and 4 stays for ever.
    assert list(checkpoints_in(manifest_at().files)) == ["step-000004", "step-000006", "step-000008"]
    assert {name.split("/")[1][:11] for name in objects() if name.startswith("checkpoints/")} == {
        "step-000004", "step-000006", "step-000008",
    }  # fmt: skip
    assert len(Store(URL).names("manifests")) == 1


def test_a_checkpoint_that_the_store_lost_is_left_out_and_the_one_before_taken(tmp_path: Path):
    run, other = make_run(tmp_path / "run"), RunDir(tmp_path / "other")
    copier = None
    for step in (2, 4):
        save(run, step)
        copier = copier or begun(run)
        assert copier.sync()
    store, manifest = Store(URL), manifest_at()
    store.remove([manifest.files["checkpoints/step-000004/extra.msgpack"].object])
    other.path.mkdir()
    warning, line = fetch(store, manifest, other, ignore)
    assert "the mirror's checkpoint step-000004 is left out" in warning
    assert line.startswith(f"fetched the run from {URL}: step-000002")
    assert other.latest_checkpoint == "step-000002"

    store.remove([manifest.files["checkpoints/step-000002/extra.msgpack"].object])
    last = RunDir(tmp_path / "last")
    last.path.mkdir()
    with pytest.raises(StoreError, match="no checkpoint of the run"):
        fetch(store, manifest, last, ignore)
    assert not last.config.exists()


def test_only_files_that_changed_are_copied_again_and_an_early_finished_marker_is_left_out(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run")
    save(run, 2)
    (run.path / "export").mkdir()
    (run.path / "export" / "model.safetensors").write_bytes(b"weights")
    copier = begun(run)
    assert copier.sync()
    before = manifest_at().files
    with run.metrics.open("a") as file:
        file.write('{"step": 3}\n')
    assert copier.sync()
    after = manifest_at().files
    assert {name for name in after if after[name].object != before[name].object} == {"metrics.jsonl"}

    # The run ends between the look at `latest` and the copy of the files.
    real = Copier._copy_files

    def copy(self: Copier, whole: dict[str, Stored]) -> Any:
        if run.latest_checkpoint == "step-000002":
            save(run, 4)
            run.finished_marker.write_text("{}")
        return real(self, whole)

    monkeypatch.setattr(Copier, "_copy_files", copy)
    assert not copier.sync()
    assert "finished.json" not in manifest_at().files
    assert copier.sync()
    assert (manifest_at().latest, "finished.json" in manifest_at().files) == ("step-000004", True)


def test_the_mirror_of_another_run_or_of_a_continuation_elsewhere_is_refused(tmp_path: Path):
    run, other, elsewhere = make_run(tmp_path / "a"), make_run(tmp_path / "b", "run-b"), RunDir(tmp_path / "c")
    save(run, 2)
    save(other, 2)
    copier = begun(run)
    assert copier.sync(is_last=True)
    with pytest.raises(RunError, match=r"expected the run run-b of .*/b in memory://bucket/run, got the run run-a"):
        begun(other)

    # The run goes on from the URL in another directory. The first directory then is behind a history of its own.
    elsewhere.path.mkdir()
    fetch(Store(URL), manifest_at(), elsewhere, ignore)
    save(elsewhere, 4)
    assert begun(elsewhere).sync(is_last=True)
    with pytest.raises(RunError, match=r"has continued the run in memory://bucket/run .*, up to step-000004, and .*/a"):
        begun(run)
    # It was still alive: its next copy is refused, and changes nothing.
    before = manifest_at()
    save(run, 6)
    with pytest.raises(LineageError, match="has taken over memory://bucket/run"):
        copier.sync()
    assert manifest_at() == before


def test_a_process_gives_signs_of_life_during_a_long_copy(tmp_path: Path, monkeypatch):
    run, is_alive, real = make_run(tmp_path / "run"), threading.Event(), Store.put
    save(run, 2)
    copier = begun(run)
    assert copier.sync()
    before = manifest_at()
    save(run, 4)

    def put(self: Store, path: Path, *rest: Any) -> Any:
        """The copy of this file ends only after the next manifest."""
        if path.name == "extra.msgpack":
            assert is_alive.wait(20)
        return real(self, path, *rest)

    def write(self: Store, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"bucket/run/{name}", data)
        is_alive.set()

    monkeypatch.setattr(Store, "put", put)
    monkeypatch.setattr(Store, "write", write)
    monkeypatch.setattr(copiers, "BEAT_S", 0.05)
    assert copier.sync()
    assert manifest_at().number >= before.number + 2
    assert manifest_at().latest == "step-000004"


def test_fresh_needs_an_empty_mirror_and_an_empty_one_is_no_run(tmp_path: Path):
    config = config_of(tmp_path / "new")
    assert bring_back(config, fresh=False, show=ignore) == []
    run = make_run(tmp_path / "run")
    save(run, 2)
    assert begun(run).sync(is_last=True)
    for options in ({"fresh": True}, {"fresh": False, "is_fork": True}):
        with pytest.raises(RunError, match="name another URL, or leave out --fresh and --from"):
            bring_back(config, show=ignore, **options)
    assert not RunDir(Path(config.run.dir)).config.exists()


def test_a_store_that_is_down_refuses_a_new_run_and_lets_a_run_here_go_on(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run")

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ConnectionError("no route")

    for call in ("pipe_file", "find"):
        monkeypatch.setattr(MemoryFileSystem, call, fail)
    here, new = config_of(run.path), config_of(tmp_path / "new")
    assert bring_back(here, fresh=False, show=ignore) == []
    assert check_mirror(here) == (
        f"checkpoint.mirror: {URL}/probe: ConnectionError: no route; it is tried again while the run goes"
    )
    with pytest.raises(StoreError, match="ConnectionError: no route"):
        bring_back(new, fresh=False, show=ignore)
    with pytest.raises(StoreError, match="ConnectionError: no route"):
        check_mirror(new)
    monkeypatch.undo()
    assert check_mirror(new) == ""
    assert objects() == []


def test_the_process_outlives_an_outage_says_so_and_copies_all_before_it_ends(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run")
    save(run, 2)
    finish, calls, real = threading.Event(), list[str](), MemoryFileSystem.pipe_file

    def fail_twice(self: MemoryFileSystem, path: str, value: bytes, **kwargs: Any) -> Any:
        calls.append(path)
        if len(calls) <= 2:
            behind.append(mirror_line(run))
            raise ConnectionError("no route")
        finish.set()
        return real(self, path, value, **kwargs)

    behind: list[str] = []
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail_twice)
    monkeypatch.setattr("async_rl.extensions.ops.mirror.passes._LOOK_S", 0.01)
    assert mirror_run(run, CheckpointConfig(mirror=URL), finish)
    assert manifest_at().has_ended
    assert is_complete(config_of(run.path))
    first, last = run.notes.read_text().splitlines()
    assert first.startswith("the mirror fails, and is tried again while the run goes on: checkpoint.mirror: memory")
    assert last.startswith("the mirror works again, after ")
    assert mirror_line(run) == f"{URL} has step-000002"


def test_who_reads_compares_with_the_newest_checkpoint_when_the_process_that_copies_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(tmp_path / "run")
    save(run, 2)
    update_status(run.path, url=URL, latest="step-000002")
    assert mirror_line(run) == f"{URL} has step-000002"
    save(run, 141)
    monkeypatch.setattr(passes.time, "time", lambda: (run.path / "mirror.json").stat().st_mtime + 61)
    assert mirror_line(run) == f"{URL} has step-000002, 139 steps behind, 1m01s after its last sign of life"
    assert MirrorPart(run).record(None) == {"mirror/behind_steps": 139}  # pyright: ignore[reportArgumentType]
    # Without a mirror.json that can be read it has nothing.
    (run.path / "mirror.json").write_text("{")
    assert MirrorPart(run).record(None) == {"mirror/behind_steps": 141}  # pyright: ignore[reportArgumentType]


def test_a_mirror_that_hangs_is_told_of_once_until_it_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, ended = make_run(tmp_path / "run"), threading.Event()
    save(run, 3)
    update_status(run.path, url=URL, latest="step-000001")
    clock = itertools.count(step=passes._HANGS_S / 2 + 1)

    def hang(_run: RunDir, _config: CheckpointConfig, finish: threading.Event) -> bool:
        finish.wait()
        assert ended.wait(20)
        return False

    monkeypatch.setattr(passes, "mirror_run", hang)
    monkeypatch.setattr(passes.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(passes.time, "time", lambda: 0.0)
    said: list[str] = []
    mirror = passes.StoreMirror(run, CheckpointConfig(mirror=URL, mirror_wait_s=0.01), said.append)
    for error in ("", "it answers, and hangs again"):
        update_status(run.path, error=error)
        for _ in range(5):
            mirror.look()
    behind = "2 steps behind, 0s after its last sign of life"
    line = f"{URL} has step-000001, {behind}"
    told = f"the mirror has not answered for a while: {line}"
    assert run.notes.read_text().splitlines() == [told, f"{told}; it answers, and hangs again"]
    assert not mirror.finish()
    ended.set()
    assert said[0].startswith("waiting up to 0s for the mirror (checkpoint.mirror_wait_s; Ctrl-C ends this): memory://")
    assert said[1].startswith(f"warning: not everything is mirrored: {line}")
    assert said[1].endswith("; the same command copies the rest")


@pytest.mark.parametrize("what", ["damaged", "newer"])
def test_the_end_does_not_wait_for_what_waiting_can_not_mend(tmp_path: Path, what: str):
    run, finish = make_run(tmp_path / "run"), threading.Event()
    for step in (2, 4):
        save(run, step)
        assert begun(run).sync()
    if what == "damaged":
        save(run, 6)
        (run.checkpoints / "step-000006" / "extra.msgpack").write_bytes(b"")
        words = "the checkpoint step-000006 is damaged, or was removed: "
    else:
        (run.checkpoints / "step-000004").rename(run.checkpoints / "step-000004.damaged-1")
        (run.checkpoints / "latest").write_text("step-000002")
        words = "the mirror has step-000004-"
    finish.set()
    assert not mirror_run(run, CheckpointConfig(mirror=URL), finish)
    assert not is_complete(config_of(run.path))
    assert manifest_at().has_ended
    assert run.notes.read_text().startswith(f"the run is not mirrored: {words}")
    assert words in mirror_line(run)
    assert (", and keeps 1 that the run lost" in mirror_line(run)) == (what == "newer")


def test_a_process_that_was_replaced_says_so_and_ends(tmp_path: Path):
    run, other = make_run(tmp_path / "run"), RunDir(tmp_path / "other")
    save(run, 2)
    assert begun(run).sync(is_last=True)
    bring_back(config_of(other.path), fresh=False, show=ignore)
    assert begun(other).sync()
    save(run, 4)
    assert not mirror_run(run, CheckpointConfig(mirror=URL), threading.Event())
    assert "has continued the run in memory://bucket/run from another directory" in mirror_line(run)


def test_a_learner_without_a_whole_checkpoint_is_told_that_the_mirror_has_one(tmp_path: Path):
    run = make_run(tmp_path / "run")
    save(run, 2)
    update_status(run.path, url=URL, latest="step-000002")
    (run.checkpoints / "step-000002" / "extra.msgpack").write_bytes(b"")
    words = f"The mirror {URL} has step-000002; to go on from there, name an empty run.dir. Put back an undamaged copy"
    with pytest.raises(RunError, match=words):
        find_resume_point(run.path)


def test_a_long_comparison_of_files_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, is_alive, real = make_run(tmp_path / "run"), threading.Event(), copiers._entry_of
    save(run, 2)
    assert begun(run).sync()
    before, copier = manifest_at(), begun(run)
    number = manifest_at().number

    def entry_of(path: Path, *rest: Any) -> Any:
        """The file is read only after the next manifest."""
        assert is_alive.wait(20)
        return real(path, *rest)

    def write(self: Store, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"bucket/run/{name}", data)
        is_alive.set()

    monkeypatch.setattr(copiers, "_entry_of", entry_of)
    monkeypatch.setattr(Store, "write", write)
    monkeypatch.setattr(copiers, "BEAT_S", 0.05)
    assert copier.sync()
    assert manifest_at().number > number
    assert manifest_at().files == before.files


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/path", "expected a URL such as s3://bucket/path"),
        ("file://", "expected a URL such as"),
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
