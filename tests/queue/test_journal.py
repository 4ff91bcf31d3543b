"""The journal and the files of payloads: commits, restarts, damage, and disks without room."""

import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import asdict

from async_rl.errors import ConfigError, QueueError, StorageFullError
from async_rl.net.wire import decode, encode
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.storage import payloads
from async_rl.queue.storage.index import is_damage, write_meta
from async_rl.queue.storage.journal import Change, Journal, Saved, file_system_at, is_network_file_system
from async_rl.queue.storage.payloads import Files, PayloadRef, disk_error
from tests.examples import examples
from tests.full_disk import file_size_limit

ROOT = Path(__file__).resolve().parent.parent.parent


def put(key: str, ref: PayloadRef) -> Change:
    return Change("group", key, {"ref": asdict(ref)})


def delete(key: str) -> Change:
    return Change("group", key, None)


def reopened(directory: Path) -> tuple[Journal, Saved, dict[str, PayloadRef]]:
    """A journal that went on where the last one stopped, and the refs of its groups."""
    journal = Journal(directory)
    saved = journal.load()
    assert saved is not None
    refs = {key: PayloadRef(**fields["ref"]) for key, fields in saved.entries["group"].items()}
    journal.adopt(refs.values())
    return journal, saved, refs


def group_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("group-*"))


# Records.


def test_the_log_stays_bounded(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        for number in range(3000):
            journal.commit([Change("closed_lease", str(number % 10), {"number": number})], {"queue": bytes(4096)})
        # A log of 1000 pages of 4 KiB and little more.
        assert (tmp_path / "index.sqlite-wal").stat().st_size < 5 << 20
        assert (tmp_path / "index.sqlite").stat().st_size < 1 << 20


def test_a_record_that_cannot_be_written_down_fails_its_commit_whole(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        with pytest.raises(TypeError):
            journal.commit([Change("closed_lease", "a", {}), Change("closed_lease", "b", {"x": object()})], {})
        journal.commit([Change("closed_lease", "c", {})], {})
        saved = journal.load()
    assert saved is not None
    assert set(saved.entries["closed_lease"]) == {"c"}


# Random histories against a model.


class JournalMachine(RuleBasedStateMachine):
    """Payloads are kept, released and committed; processes end in good order, or by a crash: then all they leave is
    their files."""

    @initialize()
    def start(self) -> None:
        self.home = Path(tempfile.mkdtemp())
        self.num_directories, self.num_kept = 0, 0
        self.payloads: dict[str, bytes] = {}
        self.refs: dict[str, PayloadRef] = {}
        self.changes: list[Change] = []
        self.committed: dict[str, bytes] | None = None
        self.journal = Journal(self.home / "0")

    @rule(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=12))
    def keep(self, sizes: list[int]) -> None:
        for size in sizes:
            self.num_kept += 1
            key, payload = str(self.num_kept), bytes([self.num_kept % 256]) * size
            self.refs[key], self.payloads[key] = self.journal.keep(payload), payload
            self.changes.append(put(key, self.refs[key]))

    @precondition(lambda self: self.payloads)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        for key in data.draw(st.lists(st.sampled_from(sorted(self.payloads)), unique=True, min_size=1)):
            self.journal.release(self.refs.pop(key))
            del self.payloads[key]
            self.changes.append(delete(key))

    @rule()
    def commit(self) -> None:
        self.journal.commit(self.changes, {"count": str(len(self.payloads)).encode()})
        self.changes, self.committed = [], dict(self.payloads)
        directory = self.home / str(self.num_directories)
        on_disk = {path.name: path.stat().st_size for path in directory.glob("group-*")}
        assert on_disk == {f"group-{ref.number:010d}": len(self.payloads[key]) for key, ref in self.refs.items()}
        self.check()

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        directory = self.home / str(self.num_directories)
        if crash:
            self.num_directories += 1
            shutil.copytree(directory, self.home / str(self.num_directories))
            directory = self.home / str(self.num_directories)
        self.journal.close()
        self.changes = []
        if self.committed is None:
            self.payloads, self.refs = {}, {}
            self.journal = Journal(directory)
            assert self.journal.load() is None
            return
        self.journal, saved, self.refs = reopened(directory)
        self.payloads = dict(self.committed)
        assert saved.state == {"count": str(len(self.payloads)).encode()}
        self.check()

    def check(self) -> None:
        assert {key: self.journal.read(ref) for key, ref in self.refs.items()} == self.payloads

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            shutil.rmtree(self.home)


TestRandomHistories = JournalMachine.TestCase
TestRandomHistories.settings = examples(40, stateful_step_count=40)


# Other processes.

COMMITS = """
import os, sys
from msgspec.structs import asdict
from pathlib import Path
from async_rl.queue.storage.payloads import PayloadRef
from async_rl.queue.storage.journal import Change
from async_rl.queue.storage.journal import Journal

journal = Journal(Path(sys.argv[1]))
saved = journal.load()
number, refs = 0, {}
if saved is not None:
    number = int(saved.state["number"])
    refs = {int(key): PayloadRef(**fields["ref"]) for key, fields in saved.entries["group"].items()}
    journal.adopt(refs.values())
while True:
    number += 1
    refs[number] = journal.keep(b"%d," % number * (number % 40 + 100))
    changes = [Change("group", str(number), {"ref": asdict(refs[number])})]
    for old in (number - 5, number - 500):
        if old in refs and (old % 50 or old == number - 500):
            journal.release(refs.pop(old))
            changes.append(Change("group", str(old), None))
    journal.commit(changes, {"number": b"%d" % number})
    os.write(1, b"%d\\n" % number)
"""
"""Every commit adds a group and deletes the one five before; every fiftieth stays for 500. Each is then reported."""


def process(script: str, directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE, cwd=ROOT)


def test_every_reported_commit_outlives_sigkill(tmp_path: Path):
    moments = random.Random(3)
    number = 0
    for _ in range(6):
        child = process(COMMITS, tmp_path)
        assert child.stdout is not None
        for _ in range(moments.randrange(1, 900)):
            child.stdout.readline()
        child.kill()
        reported = [int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
        assert child.wait() == -signal.SIGKILL
        journal, saved, refs = reopened(tmp_path)
        with closing(journal):
            before, number = number, int(saved.state["number"])
            assert number > before
            assert not reported or reported[-1] <= number <= reported[-1] + 1
            live = [n for n in range(1, number + 1) if n > number - 5 or (n % 50 == 0 and n > number - 500)]
            assert sorted(map(int, refs)) == live
            for key, ref in refs.items():
                assert journal.read(ref) == f"{key},".encode() * (int(key) % 40 + 100)
    assert number > 1000


def test_a_directory_has_one_owner(tmp_path: Path):
    child = process(COMMITS, tmp_path)
    assert child.stdout is not None
    child.stdout.readline()
    # The child goes on until its pipe is full, and waits there.
    with pytest.raises(ConfigError, match=rf"in use by process {child.pid}"):
        Journal(tmp_path)
    child.kill()
    child.wait()
    child.stdout.close()
    Journal(tmp_path).close()


def test_a_file_system_without_locks_is_refused_with_a_remedy_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("async_rl.queue.storage.journal.fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match=r"No locks available; set it to a directory on a disk with file locks"):
        Journal(tmp_path)


def test_a_journal_belongs_to_one_run_from_the_first_that_names_itself_on(tmp_path: Path):
    for identity in ("", "run 1", "", "run 1"):
        Journal(tmp_path, identity=identity).close()
    with pytest.raises(ConfigError, match=r"expected the journal of run 'run 2', got that of run 'run 1'; .*--fresh"):
        Journal(tmp_path, identity="run 2")


# The directory.


def test_a_record_that_another_program_changed_is_damage(tmp_path: Path):
    statements = (
        "UPDATE entries SET key = 'b'", "UPDATE entries SET kind = 'lease'", "UPDATE state SET value = X'00'",
        "UPDATE state SET name = 'other'", "UPDATE meta SET value = 3 WHERE name = 'format'",
        "UPDATE meta SET value = X'01' WHERE name = 'last_file'", "PRAGMA user_version = 99",
        "DROP TABLE state",
    )  # fmt: skip
    for number, statement in enumerate(statements):
        directory = tmp_path / str(number)
        with closing(Journal(directory)) as journal:
            journal.commit([Change("closed_lease", "a", {})], {"queue": b"q"})
        with closing(sqlite3.connect(directory / "index.sqlite", isolation_level=None)) as index:
            index.execute(statement)
        with closing(Journal(directory)) as journal:
            assert "is damaged" in journal.damage, statement
        assert (directory / "index.sqlite.damaged-1").exists()


def test_only_a_damaged_header_makes_a_readonly_index_a_damaged_one(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        journal.commit([Change("closed_lease", "a", {})], {})
    # SQLite reports the same error if the disk failed once when it opened the file.
    error = sqlite3.OperationalError("attempt to write a readonly database")
    error.sqlite_errorcode = sqlite3.SQLITE_READONLY
    assert not is_damage(error, tmp_path)
    data = bytearray((tmp_path / "index.sqlite").read_bytes())
    data[18] = 3  # a "write version" that SQLite does not know: it then opens the file for reading only
    (tmp_path / "index.sqlite").write_bytes(data)
    assert is_damage(error, tmp_path)
    with closing(Journal(tmp_path)) as journal:
        assert "is damaged (attempt to write a readonly database)" in journal.damage


@pytest.mark.parametrize("has_row", [False, True])  # older formats have none
def test_a_journal_of_another_format_is_refused(tmp_path: Path, has_row: bool):
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as index:
        index.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID")
        if has_row:
            write_meta(index, "format", "7")
        index.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match=r"expected a journal of format \d+, got format 7.*rename that directory"):
        Journal(tmp_path)


MOUNTS = [
    {"mountpoint": place, "fstype": kind}
    for place, kind in (
        ("/proc", "proc"), ("/", "ext4"), ("/home", "nfs4"), ("/home/local", "xfs"), ("/data", "ext4"),
        ("/data", "lustre"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/home/me/runs", "nfs4"),
        ("/home/local/runs", "xfs"),
        ("/homework", "ext4"),
        ("/data/x", "lustre"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_latest_mount(
    monkeypatch: pytest.MonkeyPatch, path: str, expected: str
):
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [SimpleNamespace(**mount) for mount in MOUNTS])
    assert file_system_at(Path(path)) == expected


def test_shared_file_systems_are_told_from_local_ones():
    shared = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "afs", "fuse.sshfs", "fuse.juicefs")
    assert all(map(is_network_file_system, shared))
    assert not any(map(is_network_file_system, ("ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "9p", "fuseblk")))


# The files of payloads.


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(tmp_path: Path):
    files = Files(tmp_path)
    kept = files.keep(b"kept")
    with file_size_limit(100), pytest.raises(QueueError, match=str(tmp_path)):
        files.keep(bytes(1000))
    assert names(tmp_path) == ["group-0000000001"]
    again = files.keep(b"again")
    assert (files.read(kept), files.read(again), again.number) == (b"kept", b"again", 3)


def test_a_file_that_can_not_be_opened_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = Files(tmp_path)
    ref = files.keep(b"body")

    def refuse(self: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StorageFullError, match="has no room"):
        files.read(ref)
    monkeypatch.undo()
    assert files.read(ref) == b"body"


# A disk without room: every call may be made again, and nothing is lost.

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int) -> None:
    """Let the next call of ``owner.name`` fail with this error number."""
    original: Callable[..., Any] = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize("code", NO_ROOM)
def test_a_payload_is_kept_at_the_second_try(tmp_path: Path, monkeypatch, code):
    with closing(Journal(tmp_path)) as journal:
        first = journal.keep(b"first")
        fail_once(monkeypatch, os, "write", code)
        with pytest.raises(StorageFullError, match=r"has no room.*free disk space"):
            journal.keep(b"second")
        second = journal.keep(b"second")
        assert (journal.read(first), journal.read(second)) == (b"first", b"second")


def test_a_commit_that_finds_no_room_is_made_again(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"body")
        journal.commit([put("a", ref)], {"queue": b"1"})
        (num_pages,) = journal._index.execute("PRAGMA page_count").fetchone()
        journal._index.execute(f"PRAGMA max_page_count = {num_pages}")
        changes = [delete("a"), Change("lease", "l", {"x": "y" * 100_000})]
        journal.release(ref)
        for _ in range(2):
            with pytest.raises(StorageFullError, match="database or disk is full"):
                journal.commit(changes, {"queue": b"2"})
        saved = journal.load()
        assert saved is not None
        assert (set(saved.entries["group"]), saved.state) == ({"a"}, {"queue": b"1"})
        assert group_names(tmp_path) == ["group-0000000001"], "the last commit names it"
        journal._index.execute("PRAGMA max_page_count = 1000000")
        journal.commit(changes, {"queue": b"2"})
        saved = journal.load()
        assert saved is not None
        assert (set(saved.entries["group"]), set(saved.entries["lease"])) == (set(), {"l"})
        assert saved.state == {"queue": b"2"}
        assert group_names(tmp_path) == []


@pytest.mark.parametrize("name", ["SQLITE_IOERR_WRITE", "SQLITE_CANTOPEN"])
@pytest.mark.parametrize("has_room", [False, True])
def test_a_probe_tells_whether_sqlite_met_a_full_disk(tmp_path: Path, monkeypatch, name, has_room):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = getattr(sqlite3, name)
    if not has_room:
        fail_once(monkeypatch, payloads.tempfile, "TemporaryFile", errno.EDQUOT)
    assert isinstance(disk_error(tmp_path, error), StorageFullError) is not has_room


@pytest.mark.slow
def test_the_learner_waits_longer_than_its_limit_while_the_queue_waits_for_room():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            peer, frame = router.recv_multipart()
            # Notices every half second go on for longer than the limit of 3 s; a busy machine may delay each by 2 s.
            for _ in range(7):
                time.sleep(0.5)
                router.send_multipart([peer, encode("notice", {"storage_full": "the disk is full"})])
            request_id = decode(frame).fields["request_id"]
            router.send_multipart([peer, encode("ok", {"request_id": request_id})])

        with ThreadPoolExecutor(1) as pool, closing(LearnerQueue(f"tcp://127.0.0.1:{port}", 3.0)) as queue:
            served = pool.submit(serve)
            queue.finish("line-a")
            served.result()
