import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import asdict

from async_rl.errors import ConfigError, QueueError
from async_rl.net.wire import pack_plain
from async_rl.queue.storage.index import is_damage, write_meta
from async_rl.queue.storage.journal import Change, Journal, Saved, file_system_of, is_network_file_system, unpack
from async_rl.queue.storage.payloads import PayloadRef
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


def test_what_was_committed_is_there_after_a_restart(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() is None
        ref = journal.keep(b"body")
        journal.commit([put("a", ref), Change("lease", "l", {"none": None, "x": 0.5})], {"queue": b"1", "other": b"2"})
        journal.commit([Change("lease", "l", {"x": 1.5})], {"queue": b"3"})
    journal, saved, refs = reopened(tmp_path)
    with closing(journal):
        assert refs == {"a": ref}
        assert saved.entries["lease"] == {"l": {"x": 1.5}}
        assert saved.entries["closed_lease"] == {}
        assert saved.state == {"queue": b"3", "other": b"2"}
        assert journal.read(ref) == b"body"


def test_of_changes_of_one_record_the_last_counts(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        fields = {"x": 1}
        journal.commit([Change("closed_lease", "a", None), Change("closed_lease", "a", fields)], {})
        journal.commit([Change("closed_lease", "b", fields), Change("closed_lease", "b", None)], {})
        saved = journal.load()
    assert saved is not None
    assert saved.entries["closed_lease"] == {"a": fields}


def test_an_empty_commit_is_a_commit(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        journal.commit([], {})
    journal, saved, refs = reopened(tmp_path)
    journal.close()
    assert (refs, saved.state) == ({}, {})


def test_a_commit_before_adoption_would_free_bodies_and_is_a_bug(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        journal.commit([put("a", journal.keep(b"body"))], {})
    with closing(Journal(tmp_path)) as journal, pytest.raises(AssertionError):
        journal.commit([], {})


def test_plain_data_is_packed_with_any_keys():
    plain = {"attempts": {17: [1, 2]}, "none": None, "digest": 2**64 - 1}
    assert unpack(pack_plain(plain)) == plain


def test_the_log_stays_bounded(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        for number in range(3000):
            journal.commit([Change("closed_lease", str(number % 10), {"number": number})], {"queue": bytes(4096)})
        # A log of 1000 pages of 4 KiB and little more.
        assert (tmp_path / "index.sqlite-wal").stat().st_size < 5 << 20
        assert (tmp_path / "index.sqlite").stat().st_size < 1 << 20


# Payloads and disk space.


def test_files_go_with_the_commit_not_with_the_release(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"body")
        journal.commit([put("a", ref)], {})
        journal.release(ref)
        assert group_names(tmp_path) == ["group-0000000001"]
        journal.commit([delete("a")], {})
        assert group_names(tmp_path) == []


def test_bodies_that_no_committed_record_names_are_gone_after_a_restart(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"named")
        journal.commit([put("a", ref)], {})
        journal.keep(b"not named")
    journal, _, refs = reopened(tmp_path)
    with closing(journal):
        journal.commit([], {})
        assert group_names(tmp_path) == ["group-0000000001"]
        assert journal.read(refs["a"]) == b"named"


def test_a_restart_never_uses_the_number_of_a_file_again(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"body")
        journal.release(ref)
        journal.commit([], {})
    assert group_names(tmp_path) == []
    journal, _, _ = reopened(tmp_path)
    with closing(journal):
        assert journal.keep(b"body").number == ref.number + 1


def test_a_damaged_byte_is_an_error_that_names_the_file(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"body")
        with (tmp_path / "group-0000000001").open("r+b") as file:
            file.write(b"B")
        with pytest.raises(QueueError, match=r"group-0000000001: .* damaged"):
            journal.read(ref)


def test_a_commit_that_the_disk_refuses_leaves_the_last_one(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"body")
        journal.commit([put("a", ref)], {"queue": b"old"})
        journal.release(ref)
        changes, state = [delete("a"), Change("lease", "l", {})], {"queue": bytes(1 << 20)}
        with file_size_limit(1 << 18), pytest.raises(QueueError, match=str(tmp_path)):
            journal.commit(changes, state)
        saved = journal.load()
        assert saved is not None
        assert (saved.state, set(saved.entries["group"]), saved.entries["lease"]) == ({"queue": b"old"}, {"a"}, {})
        assert group_names(tmp_path) == ["group-0000000001"]
        journal.commit(changes, state)
        saved = journal.load()
        assert saved is not None
        assert (len(saved.state["queue"]), saved.entries["lease"]) == (1 << 20, {"l": {}})
        assert group_names(tmp_path) == []


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


def test_a_closed_journal_gives_its_directory_back_and_a_refused_one_holds_nothing(tmp_path: Path):
    with (
        closing(Journal(tmp_path, identity="run 1")),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"),
    ):
        Journal(tmp_path, identity="run 1")
    with pytest.raises(ConfigError, match=r"expected the journal of run 'run 2', got that of run 'run 1'; .*--fresh"):
        Journal(tmp_path, identity="run 2")
    Journal(tmp_path, identity="run 1").close()


def test_an_owner_without_an_identity_comes_before_and_after_one_that_has_it(tmp_path: Path):
    for identity in ("", "run 1", "", "run 1"):
        Journal(tmp_path, identity=identity).close()
    with pytest.raises(ConfigError, match="expected the journal of run 'run 2', got that of run 'run 1'"):
        Journal(tmp_path, identity="run 2")


def test_a_journal_may_be_built_in_one_thread_and_used_in_another(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        thread = threading.Thread(target=journal.commit, args=([Change("closed_lease", "a", {})], {}))
        thread.start()
        thread.join()
        saved = journal.load()
    assert saved is not None
    assert saved.entries["closed_lease"] == {"a": {}}


# The directory.


def test_a_file_that_is_no_index_is_moved_aside(tmp_path: Path):
    for number in (1, 2):
        content = b"not a database" * 1000 * number
        (tmp_path / "index.sqlite").write_bytes(content)
        with closing(Journal(tmp_path)) as journal:
            assert "index.sqlite is damaged (file is not a database)" in journal.damage
            assert f"moved aside to index.sqlite.damaged-{number}; what the queue did" in journal.damage
            assert journal.load() is None
        assert (tmp_path / f"index.sqlite.damaged-{number}").read_bytes() == content


def test_files_of_groups_without_an_index_are_named(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        ref = journal.keep(b"body")
        journal.commit([put("a", ref)], {"queue": b"q"})
    (tmp_path / "index.sqlite").unlink()
    with closing(Journal(tmp_path)) as journal:
        assert "index.sqlite has no records, although there are files of groups" in journal.damage
        assert journal.load() is None
        # File numbers go on, and the old file goes with the first commit.
        assert journal.keep(b"next").number == 2
        journal.commit([], {})
    assert group_names(tmp_path) == ["group-0000000002"]


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


def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"queue\.journal_dir: can't use"):
        Journal(tmp_path / "file" / "queue")


MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
36 27 0:31 / /home rw,relatime shared:1 master:2 - nfs4 filer:/home rw,vers=4.2
37 36 0:32 / /home/local rw - xfs /dev/sdb rw
38 27 0:33 / /mnt/my\040disk rw - fuse.sshfs me@host:/ rw
39 27 0:34 / /data rw - ext4 /dev/sdc rw
40 39 0:35 / /data rw - lustre 10.0.0.1@tcp:/scratch rw
"""


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/var/run", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/runs", "nfs4"),
        ("/home/local/runs", "xfs"),
        ("/homework", "ext4"),
        ("/mnt/my disk/runs", "fuse.sshfs"),
        ("/data/x", "lustre"),
        ("/proc/self", "proc"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_latest_mount(path: str, expected: str):
    assert file_system_of(Path(path), MOUNTS.strip()) == expected


def test_shared_file_systems_are_told_from_local_ones():
    shared = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "afs", "fuse.sshfs", "fuse.juicefs")
    assert all(map(is_network_file_system, shared))
    assert not any(map(is_network_file_system, ("ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "9p", "fuseblk")))
