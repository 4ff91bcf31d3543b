"""Payload stores: they keep the bytes of encoded groups, which are read and released by their ``PayloadRef``.

The queue's core itself keeps only summaries of groups. ``MemoryPayloads`` keeps payloads in the memory of this process.
``Segments`` keeps them in files, so that they outlive the process. Only ``journal.Journal`` calls ``Segments``, and
decides when files may be deleted. ``RecentPayloads`` keeps the newest payloads of another store in memory, too.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sqlite3
import struct
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from async_rl.errors import DamagedPayloadError, QueueError, StorageError, StorageFullError

Payload = bytes | bytearray | memoryview
_COPY_BELOW_BYTES = 32 << 10
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"ARLBODY1"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
"""Error numbers that may stop by themselves or when space is freed: a full disk, a full quota, no free file
descriptor."""
_PROBE_BYTES = 1 << 20
_NAME = re.compile(r"segment-(\d{8,})")
_SPARE = "spare"


class PayloadRef(msgspec.Struct, frozen=True, gc=False):
    """The place of one payload in its store.

    ``digest`` is the xxh3_64 of the payload, or 0 if the store is in memory.
    """

    segment: int
    offset: int
    length: int
    digest: int


class PayloadStore(Protocol):
    """A store that keeps payloads (bytes of encoded groups) until they are released."""

    def keep(self, payload: Payload) -> PayloadRef:
        """Store ``payload``, whose bytes must not change any more. Return the ``PayloadRef`` with which to read it.

        Raises:
            StorageFullError: there is no room now.
            QueueError: the disk fails.
        """
        ...

    def read(self, ref: PayloadRef) -> Payload:
        """Return the payload with this ref.

        Raises:
            DamagedPayloadError: the payload is damaged. The caller may then only ``release`` it.
        """
        ...

    def release(self, ref: PayloadRef) -> None:
        """Delete the payload with this ref, which is never read again."""
        ...


def owned(payload: Payload) -> Payload:
    """Return ``payload`` itself if it fills its whole buffer, else a copy, so that no larger buffer stays in memory.

    A view of a part would keep the whole received message in memory. A small payload is always copied, because a small
    message may share its buffer with others.
    """
    whole = payload.obj if isinstance(payload, memoryview) else payload
    is_whole = len(payload) >= _COPY_BELOW_BYTES and memoryview(whole).nbytes == len(payload)
    return payload if is_whole else bytes(payload)


def digest_of(payload: Payload) -> int:
    """Return the xxh3_64 of a payload."""
    return xxhash.xxh3_64_intdigest(payload)


class MemoryPayloads:
    """A payload store in memory. The payloads are lost when the process ends."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._payloads)

    def keep(self, payload: Payload) -> PayloadRef:
        number = next(self._numbers)
        self._payloads[number] = owned(payload)
        return PayloadRef(0, number, len(payload), digest=0)

    def read(self, ref: PayloadRef) -> Payload:
        return self._payloads[ref.offset]

    def release(self, ref: PayloadRef) -> None:
        del self._payloads[ref.offset]


class RecentPayloads:
    """A payload store that also keeps up to ``max_bytes`` of the payloads of ``store`` in memory.

    This saves reading files, because most payloads are read once, and soon.
    """

    def __init__(self, store: PayloadStore, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._recent: dict[PayloadRef, Payload] = {}
        self.num_bytes = 0

    def keep(self, payload: Payload) -> PayloadRef:
        ref = self._store.keep(payload)
        if self.num_bytes + ref.length <= self._max_bytes:
            self._recent[ref] = owned(payload)
            self.num_bytes += ref.length
        return ref

    def read(self, ref: PayloadRef) -> Payload:
        payload = self._recent.get(ref)
        return self._store.read(ref) if payload is None else payload

    def release(self, ref: PayloadRef) -> None:
        self._store.release(ref)
        if self._recent.pop(ref, None) is not None:
            self.num_bytes -= ref.length


# Segment files.


class Spot(NamedTuple):
    """The place where a payload is stored now: its segment file's number, and the offset of the payload's header."""

    segment: int
    offset: int


class Move(NamedTuple):
    """A payload that was copied to a newer file. ``to`` is the place of the copy."""

    ref: PayloadRef
    to: Spot


@dataclass(slots=True)
class _Segment:
    """One segment file, and the refs of the payloads in it that were not released (live). Sizes include headers."""

    number: int
    path: Path
    file: int
    num_bytes: int = 0
    live_bytes: int = 0
    live: set[PayloadRef] = field(default_factory=set)


class Segments:
    """A payload store in append-only files of one directory: ``segment-00000001`` and so on, each with an open file.

    A file is full once it has ``segment_bytes``, and is removed as a whole. In a file, every payload follows a header
    with magic, length and xxh3_64. File numbers are never used again, and every process starts a new file. So no
    payload is written behind an incomplete one that a killed process left.

    One removed file is kept as ``spare``. It becomes the next segment and is overwritten from its beginning, because
    writing to existing pages costs a third of writing to new ones. Old bytes remain behind the new data, but no ref
    points to them.

    A ref has the place where its payload was *first* written, and never changes. A few payloads that are needed for
    long would keep all files that contain them. So they are copied into the newest file, and ``moved`` has their new
    places.

    A payload is checked when it is read. If it is damaged, or its file is missing or too short, ``read`` raises
    DamagedPayloadError. Such a payload is released like any other, and the others are not affected.

    ``after`` is the highest file number that the caller knows to have been used. If the disk fails, every method raises
    QueueError with the name of the directory. If the disk is full, it raises StorageFullError. Stored payloads then
    stay unchanged, and the same call may be repeated.
    """

    def __init__(self, directory: Path, segment_bytes: int, after: int = 0) -> None:
        self._directory, self._segment_bytes = directory, segment_bytes
        self._segments: dict[int, _Segment] = {}
        self._open: _Segment | None = None
        self._last = after
        # A spare file of an earlier process may be longer than ``segment_bytes``.
        (directory / _SPARE).unlink(missing_ok=True)
        self._has_spare = False
        self._maybe_empty: set[int] = set()
        self.moved: dict[PayloadRef, Spot] = {}
        self._lost: set[PayloadRef] = set()
        self.num_bytes = self.live_bytes = 0
        for path in sorted(directory.iterdir()):
            if match := _NAME.fullmatch(path.name):
                self._add(int(match[1]), path, os.O_RDONLY)

    @property
    def last(self) -> int:
        """The highest file number used so far, those of removed files included."""
        return self._last

    def keep(self, payload: Payload) -> PayloadRef:
        """Write a payload to the newest file and return its ``PayloadRef``.

        After the return, it survives this process.
        """
        digest = digest_of(payload)
        spot = self._append(_HEADER.pack(_MAGIC, len(payload), digest), payload)
        ref = PayloadRef(*spot, len(payload), digest)
        self._enter(ref, spot)
        return ref

    def read(self, ref: PayloadRef) -> bytes:
        """Return the payload that ``keep`` stored under this ``PayloadRef``.

        Raises:
            DamagedPayloadError: the payload can't be read, or its bytes are damaged.
            QueueError: the payload was released.
        """
        if ref in self._lost:
            path = self.path_of((self.moved.get(ref) or ref).segment)
            raise DamagedPayloadError(f"{path}: the file is missing or too short, so a payload is lost", str(path))
        segment, offset = self._find(ref)
        payload = self._pread(segment, ref.length, offset + _HEADER.size)
        if digest_of(payload) != ref.digest:
            raise DamagedPayloadError(
                f"{segment.path}, offset {offset}: expected a group of {ref.length} bytes with digest "
                f"{ref.digest:016x}, got one with {digest_of(payload):016x}; it is damaged", str(segment.path)
            )  # fmt: skip
        return payload

    def release(self, ref: PayloadRef) -> None:
        """Mark a payload as released. Its file stays until ``settle`` removes it.

        Raises:
            QueueError: the payload was released before, or is unknown.
        """
        if ref in self._lost:
            self._lost.discard(ref)
        else:
            self._leave(ref, self._find(ref)[0])
        self.moved.pop(ref, None)

    def adopt(self, ref: PayloadRef, spot: Spot) -> bool:
        """Keep a payload that an earlier process wrote: ``read`` finds it at its current place, ``spot``.

        Return False if its file is missing or too short. The payload is then lost.
        """
        if spot != (ref.segment, ref.offset):
            self.moved[ref] = spot
        segment = self._segments.get(spot.segment)
        if segment is None or segment.num_bytes < spot.offset + _size(ref):
            self._lost.add(ref)
            return False
        self._enter(ref, spot)
        return True

    def copy_forward(self) -> list[Move]:
        """Copy live payloads out of the files with the smallest share of live bytes, so that the files can be removed.

        Afterwards the released bytes are at most as many as the live ones, or as two files have. Return the moves. They
        take effect with ``settle``; until then both copies exist, and the new one counts as released. On a full disk,
        copy as many as possible, because the next commit may free space.

        Bytes are copied without a check. Damage is noticed when the payload is read. A payload that can't be copied is
        lost.
        """
        excess = self.num_bytes - self.live_bytes - max(2 * self._segment_bytes, self.live_bytes)
        if excess <= 0:
            return []
        moves: list[Move] = []
        closed = [segment for segment in self._segments.values() if segment is not self._open]
        for segment in sorted(closed, key=lambda s: s.live_bytes / max(s.num_bytes, 1)):
            if excess <= 0:
                break
            excess -= segment.num_bytes - segment.live_bytes
            for ref in list(segment.live):
                _, offset = self._find(ref)
                try:
                    moves.append(Move(ref, self._append(self._pread(segment, _size(ref), offset))))
                except StorageFullError:
                    return moves
                except DamagedPayloadError:
                    self._leave(ref, segment)
                    self._lost.add(ref)
        return moves

    def settle(self, moves: Iterable[Move]) -> None:
        """Use the new places of the payloads in ``moves``, which are now committed.

        Then remove files without live payloads.
        """
        for ref, spot in moves:
            self._leave(ref, self._find(ref)[0])
            self.moved[ref] = spot
            self._enter(ref, spot)
        for number in list(self._maybe_empty):
            segment = self._segments[number]
            if segment is not self._open and not segment.live:
                self._give_up(segment)
            if segment is not self._open:
                self._maybe_empty.discard(number)

    def close(self) -> None:
        for segment in self._segments.values():
            os.close(segment.file)
        self._segments.clear()

    # Which payloads are live.

    def _find(self, ref: PayloadRef) -> tuple[_Segment, int]:
        number, offset = self.moved.get(ref) or Spot(ref.segment, ref.offset)
        segment = self._segments.get(number)
        if segment is None or ref not in segment.live:
            raise QueueError(
                f"{self.path_of(number)}: expected a live group at offset {offset}, got none: it was released, or not "
                f"adopted after a restart; this is a bug in async-rl, please report it"
            )
        return segment, offset

    def _enter(self, ref: PayloadRef, spot: Spot) -> None:
        segment, size = self._segments[spot.segment], _size(ref)
        segment.live.add(ref)
        segment.live_bytes += size
        self.live_bytes += size

    def _leave(self, ref: PayloadRef, segment: _Segment) -> None:
        segment.live.remove(ref)
        segment.live_bytes -= _size(ref)
        self.live_bytes -= _size(ref)
        if not segment.live:
            self._maybe_empty.add(segment.number)

    # Files.

    def _append(self, *parts: Payload) -> Spot:
        segment = self._open
        if segment is None:
            segment = self._open = self._next()
        start, size = segment.num_bytes, sum(map(len, parts))
        try:
            written = os.pwritev(segment.file, parts, start)
            if written != size:
                _write_rest(segment.file, b"".join(parts), written, start)
        except OSError as error:
            # The next payload is written at ``start``, whether or not the file can be cut there.
            with suppress(OSError):
                os.ftruncate(segment.file, start)
            raise disk_error(self._directory, error) from error
        segment.num_bytes += size
        self.num_bytes += size
        if segment.num_bytes >= self._segment_bytes:
            self._open = None
        return Spot(segment.number, start)

    def _pread(self, segment: _Segment, size: int, offset: int) -> bytes:
        try:
            data = os.pread(segment.file, size, offset)
        except OSError as error:
            raise DamagedPayloadError(f"{segment.path}, offset {offset}: {error}", str(segment.path)) from error
        if len(data) != size:
            raise DamagedPayloadError(
                f"{segment.path}, offset {offset}: expected {size} bytes, got {len(data)}; the file is cut off",
                str(segment.path),
            )
        return data

    def _give_up(self, segment: _Segment) -> None:
        try:
            if self._has_spare or segment.num_bytes < self._segment_bytes:
                segment.path.unlink()
            else:
                segment.path.rename(self._directory / _SPARE)
                self._has_spare = True
        except OSError as error:
            raise disk_error(self._directory, error) from error
        os.close(segment.file)
        del self._segments[segment.number]
        self.num_bytes -= segment.num_bytes

    def _next(self) -> _Segment:
        """Open an empty file to write to."""
        number = self._last + 1
        path, flags = self.path_of(number), os.O_RDWR | os.O_CREAT
        if self._has_spare:
            try:
                (self._directory / _SPARE).rename(path)
            except OSError as error:
                raise disk_error(self._directory, error) from error
            # If opening fails, the file is in place for the next try.
            self._has_spare = False
        segment = self._add(number, path, flags)
        self.num_bytes -= segment.num_bytes
        segment.num_bytes = 0
        return segment

    def _add(self, number: int, path: Path, flags: int) -> _Segment:
        try:
            file = os.open(path, flags, 0o600)
            try:
                size = os.fstat(file).st_size
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            raise disk_error(self._directory, error) from error
        segment = self._segments[number] = _Segment(number, path, file, size)
        self.num_bytes += segment.num_bytes
        self._last = max(self._last, number)
        self._maybe_empty.add(number)
        return segment

    def path_of(self, number: int) -> Path:
        """Return the path of the segment file with this number. The file need not exist."""
        return self._directory / f"segment-{number:08d}"


def disk_error(directory: Path, error: Exception) -> StorageError:
    """Return the error to raise when the disk refuses a write or read.

    It is StorageFullError if a later try may succeed.
    """
    if is_out_of_room(error, directory):
        return StorageFullError(
            f"the queue's journal in {directory} has no room: {error}; free disk space or quota there, or raise the "
            f"limit on open files (ulimit -n)"
        )
    return StorageError(
        f"the queue's journal in {directory} can't be read or written: {error}; check that disk and start the run "
        f"again. If this repeats, rename the directory first: then the run resumes from its last checkpoint"
    )


def is_out_of_room(error: Exception, directory: Path) -> bool:
    """Return whether ``error`` means that the disk, a quota or the file descriptors are used up.

    SQLite reports a full quota and missing descriptors with the same codes as other causes. For these codes, the
    function tries to write a temporary file in ``directory``.
    """
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = error.sqlite_errorcode & 0xFF
    return code == sqlite3.SQLITE_FULL or (
        code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and not _has_room(directory)
    )


def _has_room(directory: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return error.errno not in _NO_ROOM
    return True


def _size(ref: PayloadRef) -> int:
    return _HEADER.size + ref.length


def _write_rest(file: int, data: bytes, written: int, start: int) -> None:
    """Write the bytes of ``data`` from ``written`` on, after a write that stopped early.

    Raise OSError if the disk is full.
    """
    while written < len(data):
        written += os.pwrite(file, memoryview(data)[written:], start + written)
