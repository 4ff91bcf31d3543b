"""The queue's state on disk: payloads in segment files, and an SQLite index of small records over them.

The server appends payloads as they arrive. Once a turn it commits the changes, before it sends that turn's replies.
Committed data survives the death of any process. The operating system writes it to disk later, because nothing is
synced. So a power cut may lose or damage data; damage is reported as an error, and wrong bytes are never returned.

One process at a time owns a directory, through a lock that ends with the process. The directory must be on a local
disk: on a network file system neither locks nor the order of writes are reliable.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from async_rl.errors import ConfigError, QueueError
from async_rl.net.wire import pack_plain
from async_rl.queue.storage.payloads import Move, Payload, PayloadRef, Segments, Spot, disk_error

_NETWORK_FILE_SYSTEMS = frozenset({
    "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs_nodev", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
})  # fmt: skip
"""9p and virtiofs are not listed: they give a virtual machine or a sandbox access to the disk of its host."""
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.bindfs", "fuse.gocryptfs", "fuse.encfs"})
"""Other FUSE file systems are mostly network file systems, and are refused."""

_START_OVER = "rename that directory, or start the queue with --fresh, which renames it and begins with an empty queue"
_FORMAT = 3
"""Increase this number with every change of the tables, or of the kinds and fields of records."""
_PRAGMAS = (
    # One owner: no shared-memory file, and no file locks to take in every transaction.
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    # At COMMIT the operating system has the log. Syncing it would protect only against power loss.
    "synchronous = OFF",
    # No files besides the index and its log, so that a commit needs no new descriptor.
    "temp_store = MEMORY",
    # The log is emptied into the index at this many pages, and cut back after a larger transaction.
    "wal_autocheckpoint = 1000",
    "journal_size_limit = 8388608",
)
_SCHEMA = f"""
    BEGIN;
    CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE state (name TEXT PRIMARY KEY, value BLOB);
    CREATE TABLE entries (kind TEXT, key TEXT, fields BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID;
    CREATE TABLE moved (
        segment INTEGER, offset INTEGER, to_segment INTEGER, to_offset INTEGER, PRIMARY KEY (segment, offset)
    ) WITHOUT ROWID;
    PRAGMA user_version = {_FORMAT};
    COMMIT;
"""
# This updates the row in place. REPLACE would delete it and write its index entry again.
_PUT_STATE = "INSERT INTO state VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"


Kind = Literal["group", "snapshot", "lease", "closed_lease", "evaluation", "answer", "generator"]
"""Records by lease id: ``group`` (ready, taken, or referred to by a snapshot), ``lease`` (in flight), ``closed_lease``.
By name: ``snapshot`` (the groups it refers to), ``evaluation``, ``answer`` (one row of an evaluation), and
``generator``."""


class Change(NamedTuple):
    """The current fields of a changed record; ``fields`` is None if it was deleted."""

    kind: Kind
    key: str
    fields: Any


class Changes:
    """The records that the queue's core changed since the last commit, each in its latest state.

    The server drains them once a turn and commits them before any reply of that turn is sent. A record that was added
    and deleted in between is never written. Without ``is_wanted`` (no journal) nothing is collected.
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted
        self._noted: dict[tuple[Kind, str], Any] = {}
        self._fresh: set[tuple[Kind, str]] = set()

    def put(self, kind: Kind, key: str, fields: Any, *, is_new: bool = False) -> None:
        """Add or replace a record. If ``fields`` is mutable, ``drain`` decides which state is written.

        ``is_new``: no earlier commit holds this key, so deleting the record before the drain writes nothing.
        """
        if self._is_wanted:
            if is_new:
                self._fresh.add((kind, key))
            self._noted[kind, key] = fields

    def delete(self, kind: Kind, key: str) -> None:
        """Delete a record."""
        if not self._is_wanted:
            return
        if (kind, key) in self._fresh:
            self._fresh.discard((kind, key))
            del self._noted[kind, key]
        else:
            self._noted[kind, key] = None

    def drain(self) -> list[Change]:
        """Return and clear the changes since the last drain."""
        noted, self._noted = self._noted, {}
        self._fresh.clear()
        return [Change(kind, key, fields) for (kind, key), fields in noted.items()]


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of the last commit. Every kind has a map from key to fields; tuples have become lists."""

    entries: Mapping[Kind, Mapping[str, Mapping[str, Any]]]
    state: Mapping[str, bytes]


class Journal:
    """A ``PayloadStore`` that also stores small records. Both outlive the process. One process owns the directory.

    ``identity`` names the run of these records. The directory keeps the first identity that is given. An owner without
    an identity may open it, too: a server started by hand gets its run id from the learner. After a
    start: ``load``, then ``adopt`` if ``load`` returned something, then ``commit`` repeatedly. It is not thread-safe.

    Raises:
        ConfigError: the directory can't be created, or is on a network file system.
        QueueError: another process owns the directory, or it has another identity or format, or is damaged.
    """

    def __init__(self, directory: Path, *, identity: str = "", segment_bytes: int = 64 << 20) -> None:
        self._directory = directory
        refuse_network_file_system(directory)
        with ExitStack() as opened:
            opened.callback(os.close, _lock(directory))
            with _database_errors(directory):
                self._index = _open_index(directory / "index.sqlite", identity)
                opened.callback(self._index.close)
                row = self._index.execute("SELECT value FROM meta WHERE name = 'last_segment'").fetchone()
            self._last_segment: int | None = None if row is None else row[0]
            self._segments = Segments(directory, segment_bytes, after=self._last_segment or 0)
            opened.callback(lambda: self._segments.close())
            self._opened = opened.pop_all()
        self._segment_bytes = segment_bytes
        self._is_adopted = self._last_segment is None
        self._obsolete: list[tuple[int, int]] = []
        self._moves: list[Move] = []

    @property
    def num_bytes(self) -> int:
        """Bytes on disk in segment files, without the files (at most two) that are overwritten next."""
        return self._segments.num_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of payloads that were not released, with their headers. They are a part of ``num_bytes``."""
        return self._segments.live_bytes

    # Payloads.

    def keep(self, payload: Payload) -> PayloadRef:
        """Append a payload. After a restart it is present if a committed record refers to it.

        Raises:
            StorageFullError: there is no room now. QueueError: the disk fails.
        """
        return self._segments.keep(payload)

    def read(self, ref: PayloadRef) -> bytes:
        """The payload at ``ref``. Raises QueueError: it was released, or is damaged."""
        return self._segments.read(ref)

    def release(self, ref: PayloadRef) -> None:
        """Release ``ref``, which is never read again.

        Its bytes stay until a commit, because a committed record may refer to them.
        """
        if ref in self._segments.moved:
            self._obsolete.append((ref.segment, ref.offset))
        self._segments.release(ref)

    # Records.

    def commit(self, changes: Iterable[Change], state: Mapping[str, bytes]) -> None:
        """Commit all changes or none, with the payloads that they name. ``state`` replaces blobs of the same names.

        It also frees disk space: it deletes files without live payloads, and limits dead bytes to the number of live
        bytes, or to two segments if that is more.

        Raises:
            StorageFullError: there is no room now. QueueError: the disk fails. In both cases the last commit stays
                valid; next, commit the same changes again or call ``revert``.
        """
        assert self._is_adopted, "commit before adopt would free the payloads of an earlier process"
        # A commit that is tried again must not copy again: that would fill the disk.
        self._moves = self._moves or self._segments.copy_forward()
        with _database_errors(self._directory), _transaction(self._index):
            self._write_entries(changes)
            if state:
                self._index.executemany(_PUT_STATE, state.items())
            self._write_refs(self._moves)
        self._obsolete.clear()
        self._last_segment = self._segments.last
        moves, self._moves = self._moves, []
        self._segments.settle(moves)

    def revert(self) -> None:
        """Go back to the last commit: forget the payloads that were kept or released since. Then ``load`` again.

        Raises:
            QueueError: the disk fails.
        """
        self._segments.close()
        self._segments = Segments(self._directory, self._segment_bytes, after=self._last_segment or 0)
        self._obsolete.clear()
        self._moves.clear()
        self._is_adopted = self._last_segment is None

    def load(self) -> Saved | None:
        """Load the content of the last commit; None if nothing was ever committed."""
        if self._last_segment is None:
            return None
        entries: dict[Kind, dict[str, Mapping[str, Any]]] = {kind: {} for kind in get_args(Kind)}
        with _database_errors(self._directory):
            for kind, key, fields in self._index.execute("SELECT kind, key, fields FROM entries"):
                entries[kind][key] = unpack(fields)
            return Saved(entries, dict(self._index.execute("SELECT name, value FROM state")))

    def adopt(self, refs: Iterable[PayloadRef]) -> None:
        """Keep only these payloads of earlier processes. Call it after ``load``. The next commit deletes the others.

        Raises:
            QueueError: a payload is missing.
        """
        with _database_errors(self._directory):
            rows = self._index.execute("SELECT segment, offset, to_segment, to_offset FROM moved").fetchall()
        moved = {(row[0], row[1]): Spot(row[2], row[3]) for row in rows}
        for ref in set(refs):
            home = Spot(ref.segment, ref.offset)
            self._segments.adopt(ref, moved.pop(home, home))
        self._obsolete += moved
        self._is_adopted = True

    def close(self) -> None:
        """Close the files and release the directory."""
        self._opened.close()

    def _write_entries(self, changes: Iterable[Change]) -> None:
        latest = {(kind, key): fields for kind, key, fields in changes}
        puts = [(*record, pack_plain(fields)) for record, fields in latest.items() if fields is not None]
        gone = [record for record, fields in latest.items() if fields is None]
        if puts:
            self._index.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", puts)
        if gone:
            self._index.executemany("DELETE FROM entries WHERE kind = ? AND key = ?", gone)

    def _write_refs(self, moves: Iterable[Move]) -> None:
        """Write the places of moved payloads, and the highest file number used so far."""
        if self._obsolete:
            self._index.executemany("DELETE FROM moved WHERE segment = ? AND offset = ?", self._obsolete)
        rows = [(ref.segment, ref.offset, *spot) for ref, spot in moves]
        if rows:
            self._index.executemany("INSERT OR REPLACE INTO moved VALUES (?, ?, ?, ?)", rows)
        if self._last_segment != self._segments.last:
            self._index.execute("INSERT OR REPLACE INTO meta VALUES ('last_segment', ?)", (self._segments.last,))


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of ``pack_plain``; tuples have become lists."""
    return msgspec.msgpack.decode(data)


# The index.


def _open_index(path: Path, identity: str) -> sqlite3.Connection:
    """Open the database; create it if there is none. Raises QueueError: it has another identity or format."""
    # The server may be built in one thread and run in another.
    index = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            index.execute(f"PRAGMA {pragma}")
        (found_format,) = index.execute("PRAGMA user_version").fetchone()
        if not found_format:
            index.executescript(_SCHEMA)
        elif found_format != _FORMAT:
            raise QueueError(
                f"{path}: expected a journal of format {_FORMAT}, got format {found_format}, which another version of "
                f"async-rl wrote; {_START_OVER}"
            )
        if identity:
            index.execute("INSERT OR IGNORE INTO meta VALUES ('identity', ?)", (identity,))
        row = index.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
        found = identity if row is None else row[0]
        if identity and found != identity:
            raise QueueError(f"{path}: expected the journal of {identity!r}, got that of {found!r}; {_START_OVER}")
    except BaseException:
        index.close()
        raise
    return index


@contextmanager
def _transaction(index: sqlite3.Connection) -> Iterator[None]:
    index.execute("BEGIN")
    try:
        yield
        index.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors.
        if index.in_transaction:
            index.execute("ROLLBACK")
        raise


@contextmanager
def _database_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise disk_error(directory, error) from error


# The directory.


def _lock(directory: Path) -> int:
    """Create and lock the directory. The lock ends when the returned descriptor is closed."""
    with ExitStack() as opened:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        except BlockingIOError as error:
            raise QueueError(
                f"the queue's journal {directory} is in use by process "
                f"{(directory / 'lock').read_text() or 'unknown'}, probably another queue server of this run; stop "
                f"that process first"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"queue.journal_dir: can't use {directory}: {error}; set it to a directory that this user may write"
            ) from error
        opened.pop_all()
        return file


def refuse_network_file_system(directory: Path) -> None:
    """Raise ConfigError if ``directory`` is on a network file system. It need not exist.

    Without /proc/self/mountinfo (not on Linux) do nothing.
    """
    mountinfo = Path("/proc/self/mountinfo")
    if not mountinfo.exists():
        return
    found = file_system_of(directory.resolve(), mountinfo.read_text(encoding="utf-8", errors="surrogateescape"))
    if is_network_file_system(found):
        raise ConfigError(
            f"queue.journal_dir: expected a directory on this machine's own disk, got {directory} on a file system of "
            f"type {found}, where locks and the order of writes can't be relied on; set it to a local directory"
        )


def is_network_file_system(kind: str) -> bool:
    """Whether this file system type of mountinfo(5) is one that several machines share."""
    return kind in _NETWORK_FILE_SYSTEMS or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that contains ``path`` (absolute, without links), from the text of mountinfo(5)."""
    best, found = -1, "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount_point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        # The later of two mounts on one point hides the earlier.
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= best:
            best, found = len(mount_point.parts), after.split()[0]
    return found
