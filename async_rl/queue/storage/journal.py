"""The queue's state on disk: the bytes of each group (payload) in a file, and small records in an SQLite index.

The server writes payloads as they arrive. Once in each turn of its loop it commits all changes, before it sends the
replies of that turn. Committed data survives the death of any process. The operating system writes it to the disk
later, because the journal does not wait for that (no fsync). So a power cut may lose or damage data. Damaged bytes are
never returned, because payloads and records have checksums.

If a payload is damaged, only this payload is lost (``payloads.py``). The index is checked as a whole when it is opened.
If it is damaged, it is renamed to ``index.sqlite.damaged-N``, and the journal begins empty. The learner then restores
the queue from its last checkpoint. SQLite ignores damage at the end of its own log. The journal then has the content of
an earlier commit.

Only one process at a time may use a journal's directory. It holds a lock that ends with the process. The directory must
be on a local disk, because on a network file system neither locks nor the order of writes are reliable.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec
import psutil

from async_rl.errors import ConfigError, DamagedJournalError
from async_rl.net.wire import pack_plain
from async_rl.queue.storage import index as indexes
from async_rl.queue.storage.payloads import Files, Payload, PayloadRef, disk_error
from async_rl.run.lock import NO_LOCKS

_NETWORK_FILE_SYSTEMS = frozenset({
    "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs_nodev", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
})  # fmt: skip
"""Types of network file systems. 9p and virtiofs are not among them: they give a virtual machine or a sandbox access to
the disk of its host."""
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.bindfs", "fuse.gocryptfs", "fuse.encfs"})
"""FUSE file systems that are on a local disk. Others are mostly network file systems, and are refused."""

LOST = (
    "what the queue did since the learner's last checkpoint is lost: the learner restores that checkpoint, and the "
    "prompts are sampled again"
)
# This updates the row in place. REPLACE would delete it and write its index entry again.
_PUT_STATE = "INSERT INTO state VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"

Kind = Literal[
    "group", "snapshot", "lease", "closed_lease", "evaluation", "answer", "generator", "granted", "pass_rate", "place",
]  # fmt: skip
"""The kind of a record, with its key in the index. By lease id: ``group`` (ready, taken, or in a snapshot), ``lease``
(in flight), ``closed_lease`` (ended). By name: ``snapshot`` (the groups in it), ``evaluation``, ``answer`` (to one row
of an evaluation), ``generator``, and ``granted`` (the reply to a generator's last lease request). Of a curriculum:
``pass_rate`` (by row) and ``place`` (by position)."""


class Change(NamedTuple):
    """A record that was changed, with its current fields; ``fields`` is None if the record was deleted."""

    kind: Kind
    key: str
    fields: Any


class Changes:
    """The records that the queue's core has changed since the last commit, each with its newest fields.

    The server takes them once in each turn of its loop, and commits them before it sends a reply of that turn. If
    ``is_wanted`` is False (there is no journal), nothing is collected.
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted
        self._noted: dict[tuple[Kind, str], Any] = {}

    def put(self, kind: Kind, key: str, fields: Any) -> None:
        """Record that the core has added or replaced a record.

        If ``fields`` is mutable, its state at ``drain`` is written.
        """
        if self._is_wanted:
            self._noted[kind, key] = fields

    def delete(self, kind: Kind, key: str) -> None:
        """Record that the core has deleted the record with this kind and key."""
        self.put(kind, key, None)

    def drain(self) -> list[Change]:
        """Return the changes since the last call, and forget them."""
        noted, self._noted = self._noted, {}
        return [Change(kind, key, fields) for (kind, key), fields in noted.items()]


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of the last commit.

    ``entries`` has, for each kind, the fields of each record by key; tuples have become lists. ``state`` has byte
    strings by name.
    """

    entries: Mapping[Kind, Mapping[str, Mapping[str, Any]]]
    state: Mapping[str, bytes]


class Journal:
    """A ``PayloadStore`` on disk that also stores small records. Only one process at a time may use its directory.

    After a start, call ``load``, then ``adopt`` if ``load`` returned something, then ``commit`` repeatedly. It is not
    thread-safe.

    Args:
        identity: the run of the records. The directory keeps the first identity that it gets. It may be empty, because
            a server started by hand gets its run id from the learner only later.

    Attributes:
        damage: what is damaged and was moved aside, in words; empty if nothing was.

    Raises:
        ConfigError: the directory can't be created or locked, another process uses it, it is on a network file system,
            or it has another identity or format.
    """

    def __init__(self, directory: Path, *, identity: str = "") -> None:
        self._directory, self._identity = directory, identity
        self.damage = ""
        refuse_network_file_system(directory)
        with ExitStack() as opened:
            opened.callback(os.close, _lock(directory))
            with _database_errors(directory):
                try:
                    self._index = indexes.open_index(directory, identity)
                except (sqlite3.Error, DamagedJournalError) as error:
                    if not indexes.is_damage(error, directory):
                        raise
                    self.damage = f"{indexes.move_aside(directory, str(error))}; {LOST}"
                    self._index = indexes.open_index(directory, identity)
                opened.callback(lambda: self._index.close())
                last = indexes.read_meta(self._index, "last_file")
                self._files = Files(directory, after=int(last or 0))
            self._last_file: int | None = None if last is None else int(last)
            if self._last_file is None and self._files.last and not self.damage:
                self.damage = f"{directory / indexes.INDEX} has no records, although there are files of groups; {LOST}"
            self._opened = opened.pop_all()
        self._is_adopted = self._last_file is None

    # Payloads.

    def keep(self, payload: Payload) -> PayloadRef:
        """Write a payload to a file.

        After a restart the payload is still there if a committed record has its ref.

        Raises:
            StorageFullError: there is no room now.
            QueueError: the disk fails.
        """
        return self._files.keep(payload)

    def read(self, ref: PayloadRef) -> bytes:
        """Return the payload with this ref.

        Raises:
            DamagedPayloadError: the payload is damaged or missing.
            QueueError: the payload was released.
        """
        return self._files.read(ref)

    def release(self, ref: PayloadRef) -> None:
        """Give up a payload, which is never read again.

        Its file stays until a commit, because a committed record may still have its ref.
        """
        self._files.release(ref)

    # Records.

    def commit(self, changes: Iterable[Change], state: Mapping[str, bytes]) -> None:
        """Write all changes, or none, together with the payloads whose refs they have.

        ``state`` has byte strings by name, which replace those of the same names. Then the files of payloads that were
        released are removed.

        Raises:
            StorageFullError: there is no room now.
            QueueError: the disk fails. After both errors the last commit is still valid. Commit the same changes again,
                or call ``revert``.
        """
        assert self._is_adopted, "commit before adopt would free the payloads of an earlier process"
        with _database_errors(self._directory), indexes.transaction(self._index):
            self._write_entries(changes)
            if state:
                self._index.executemany(_PUT_STATE, [(name, indexes.seal(data, name)) for name, data in state.items()])
            if self._last_file != self._files.last:
                indexes.write_meta(self._index, "last_file", str(self._files.last))
        self._last_file = self._files.last
        self._files.settle()

    def revert(self) -> None:
        """Go back to the last commit: forget the payloads that were kept or released since. Then ``load`` again.

        Raises:
            QueueError: the disk fails.
        """
        with _database_errors(self._directory):
            self._files = Files(self._directory, after=self._files.last)
        self._is_adopted = self._last_file is None

    def load(self) -> Saved | None:
        """Return the content of the last commit; None if nothing was ever committed."""
        if self._last_file is None:
            return None
        with _database_errors(self._directory):
            entries: dict[Kind, dict[str, Mapping[str, Any]]] = {kind: {} for kind in get_args(Kind)}
            for kind, key, data in indexes.read_entries(self._index):
                entries[cast(Kind, kind)][key] = unpack(data)
            return Saved(entries, indexes.read_state(self._index))

    def adopt(self, refs: Iterable[PayloadRef]) -> list[Path]:
        """Keep only the payloads ``refs`` of earlier processes. The next commit deletes all others.

        Call it after ``load``. Return the files that are missing or too short. Their payloads are lost: to read one
        raises DamagedPayloadError.
        """
        self._is_adopted = True
        return self._files.adopt(refs)

    def move_aside(self, reason: str) -> None:
        """Rename the index because its records don't fit together (``reason``), and go on with an empty journal.

        Raises:
            QueueError: the disk fails.
        """
        with _database_errors(self._directory):
            self._index.close()
            self.damage = f"{indexes.move_aside(self._directory, reason)}; {LOST}"
            self._index = indexes.open_index(self._directory, self._identity)
        self._last_file = None
        self.revert()

    def close(self) -> None:
        """Close the files and unlock the directory."""
        self._opened.close()

    def _write_entries(self, changes: Iterable[Change]) -> None:
        latest = {(kind, key): fields for kind, key, fields in changes}
        kept = [(record, pack_plain(fields)) for record, fields in latest.items() if fields is not None]
        puts = [(*record, indexes.seal(data, *record)) for record, data in kept]
        gone = [record for record, fields in latest.items() if fields is None]
        if puts:
            self._index.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", puts)
        if gone:
            self._index.executemany("DELETE FROM entries WHERE kind = ? AND key = ?", gone)


def unpack(data: bytes) -> dict[str, Any]:
    """Return the data that ``pack_plain`` packed. Tuples have become lists."""
    return msgspec.msgpack.decode(data)


@contextmanager
def _database_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise disk_error(directory, error) from error


# The directory.


def _lock(directory: Path) -> int:
    """Create and lock a journal's directory. Return a file descriptor; closing it ends the lock."""
    with ExitStack() as opened:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        except BlockingIOError as error:
            raise ConfigError(
                f"queue.journal_dir: {directory} is in use by process "
                f"{(directory / 'lock').read_text() or 'unknown'}, probably another queue server of this run; stop "
                f"that process first"
            ) from error
        except OSError as error:
            remedy = "on a disk with file locks" if error.errno in NO_LOCKS else "that this user may write"
            raise ConfigError(
                f"queue.journal_dir: can't use {directory}: {error}; set it to a directory {remedy}"
            ) from error
        opened.pop_all()
        return file


def refuse_network_file_system(directory: Path) -> None:
    """Raise ConfigError if ``directory``, which need not exist, is on a network file system."""
    file_system = file_system_at(directory)
    if is_network_file_system(file_system):
        raise ConfigError(
            f"queue.journal_dir: expected a directory on this machine's own disk, got {directory} on a file system of "
            f"type {file_system}, where locks and the order of writes can't be relied on; set it to a local directory"
        )


def file_system_at(directory: Path) -> str:
    """Return the type of the file system of ``directory``, which need not exist; empty where it is unknown."""
    path, best, file_system = directory.resolve(), -1, ""
    for mount in psutil.disk_partitions(all=True):
        mount_point = Path(mount.mountpoint)
        # The later of two mounts on one point hides the earlier.
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= best:
            best, file_system = len(mount_point.parts), mount.fstype
    return file_system


def is_network_file_system(kind: str) -> bool:
    """Return whether several machines can share a file system of the type ``kind`` (as in proc_mounts(5))."""
    return kind in _NETWORK_FILE_SYSTEMS or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)
