"""The queue's state on disk: payloads in segment files, and an SQLite index of small records over them.

The server appends payloads as they arrive. Once a turn it commits the changes, before it sends that turn's replies.
Committed data survives the death of any process. The operating system writes it to disk later, because nothing is
synced. So a power cut may lose or damage data. Wrong bytes are never returned: payloads and records have checksums.

A damaged payload is lost alone (``payloads.py``). The index is checked as a whole when it is opened. If it is damaged,
it is moved aside to ``index.sqlite.damaged-N``, and the journal begins empty: the learner then restores the queue from
its last checkpoint. SQLite itself ignores a damaged end of its log. The journal is then at an earlier commit.

One process at a time owns a directory, through a lock that ends with the process. The directory must be on a local
disk: on a network file system neither locks nor the order of writes are reliable.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec

from async_rl.errors import ConfigError, DamagedJournalError, QueueError
from async_rl.net.wire import pack_plain
from async_rl.queue.storage import index as indexes
from async_rl.queue.storage.payloads import Move, Payload, PayloadRef, Segments, Spot, disk_error

_NETWORK_FILE_SYSTEMS = frozenset({
    "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs_nodev", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
})  # fmt: skip
"""9p and virtiofs are not listed: they give a virtual machine or a sandbox access to the disk of its host."""
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.bindfs", "fuse.gocryptfs", "fuse.encfs"})
"""Other FUSE file systems are mostly network file systems, and are refused."""

LOST = (
    "what the queue did since the learner's last checkpoint is lost: the learner restores that checkpoint, and the "
    "prompts are sampled again"
)
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

    ``damage`` says what is damaged and was moved aside; empty if nothing was.

    Raises:
        ConfigError: the directory can't be created, or is on a network file system.
        QueueError: another process owns the directory, or it has another identity or format.
    """

    def __init__(self, directory: Path, *, identity: str = "", segment_bytes: int = 64 << 20) -> None:
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
                last = indexes.read_meta(self._index, "last_segment")
            self._last_segment: int | None = None if last is None else int(last)
            self._segments = Segments(directory, segment_bytes, after=self._last_segment or 0)
            if self._last_segment is None and self._segments.last and not self.damage:
                self.damage = f"{directory / indexes.INDEX} has no records, although there are segment files; {LOST}"
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
        """The payload at ``ref``. Raises DamagedPayloadError: it can't be read back. QueueError: it was released."""
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
        with _database_errors(self._directory), indexes.transaction(self._index):
            self._write_entries(changes)
            if state:
                self._index.executemany(_PUT_STATE, [(name, indexes.seal(data, name)) for name, data in state.items()])
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
        with _database_errors(self._directory):
            entries: dict[Kind, dict[str, Mapping[str, Any]]] = {kind: {} for kind in get_args(Kind)}
            for kind, key, data in indexes.read_entries(self._index):
                entries[cast(Kind, kind)][key] = unpack(data)
            return Saved(entries, indexes.read_state(self._index))

    def adopt(self, refs: Iterable[PayloadRef]) -> Counter[str]:
        """Keep only these payloads of earlier processes. Call it after ``load``. The next commit deletes the others.

        Return the files that are missing or too short, with the number of payloads that are lost. Reading these raises
        DamagedPayloadError.
        """
        with _database_errors(self._directory):
            moved = indexes.read_moved(self._index)
        lost: Counter[str] = Counter()
        for ref in set(refs):
            home = Spot(ref.segment, ref.offset)
            spot = moved.pop(home, home)
            if not self._segments.adopt(ref, spot):
                lost[str(self._segments.path_of(spot.segment))] += 1
        self._obsolete += moved
        self._is_adopted = True
        return lost

    def move_aside(self, reason: str) -> None:
        """Move the index aside, because its records do not belong together, and go on with an empty journal.

        Raises:
            QueueError: the disk fails.
        """
        with _database_errors(self._directory):
            self._index.close()
            self.damage = f"{indexes.move_aside(self._directory, reason)}; {LOST}"
            self._index = indexes.open_index(self._directory, self._identity)
        self._last_segment = None
        self.revert()

    def close(self) -> None:
        """Close the files and release the directory."""
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

    def _write_refs(self, moves: Iterable[Move]) -> None:
        """Write the places of moved payloads, and the highest file number used so far."""
        if self._obsolete:
            self._index.executemany("DELETE FROM moved WHERE segment = ? AND offset = ?", self._obsolete)
        rows = [(ref.segment, ref.offset, *spot) for ref, spot in moves]
        if rows:
            self._index.executemany("INSERT OR REPLACE INTO moved VALUES (?, ?, ?, ?)", rows)
        if self._last_segment != self._segments.last:
            indexes.write_meta(self._index, "last_segment", str(self._segments.last))


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of ``pack_plain``; tuples have become lists."""
    return msgspec.msgpack.decode(data)


@contextmanager
def _database_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
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
