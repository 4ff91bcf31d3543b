"""Payload stores: they keep the bytes of encoded groups, which are read and released by their ``PayloadRef``.

The queue's core itself keeps only summaries of groups. ``MemoryPayloads`` keeps payloads in the memory of this process.
``Files`` keeps each in a file, so that they outlive the process. Only ``journal.Journal`` calls ``Files``, and decides
when files may be deleted.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from async_rl.errors import DamagedPayloadError, QueueError, StorageError, StorageFullError

Payload = bytes | bytearray | memoryview
BLOCK_BYTES = 4096
"""What a file takes on disk is a multiple of this."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
"""Error numbers that may stop by themselves or when space is freed: a full disk, a full quota, no free file
descriptor."""
_PROBE_BYTES = 1 << 20
_NAME = re.compile(r"group-(\d{10,})")


class PayloadRef(msgspec.Struct, frozen=True, gc=False):
    """One payload in its store.

    ``number`` is that of its file. ``digest`` is the xxh3_64 of the payload, or 0 if the store is in memory.
    """

    number: int
    length: int
    digest: int

    @property
    def disk_bytes(self) -> int:
        """What the payload takes on disk, in whole blocks."""
        return in_blocks(self.length)


def in_blocks(length: int) -> int:
    """Return the bytes of the blocks that a file of ``length`` bytes takes on disk."""
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


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
        # A copy: a view of a part would keep the whole received message in memory.
        self._payloads[number] = bytes(payload)
        return PayloadRef(number, len(payload), digest=0)

    def read(self, ref: PayloadRef) -> Payload:
        return self._payloads[ref.number]

    def release(self, ref: PayloadRef) -> None:
        del self._payloads[ref.number]


class Files:
    """A payload store in files of one directory, one for each payload: ``group-0000000001`` and so on.

    A number is never used twice, so no payload is taken for another. A file is written before the index commits a
    record with its ref, and ``settle`` removes it after a commit without that. Files that no record names, which a
    killed process left, go at the first ``settle``.

    A payload is checked when it is read. If it is damaged, or its file is missing or too short, ``read`` raises
    DamagedPayloadError. Such a payload is released like any other.

    ``after`` is the highest number that the caller knows to have been used. If the disk fails, every method raises
    QueueError with the name of the directory. If the disk is full, it raises StorageFullError. Stored payloads then
    stay unchanged, and the same call may be repeated.

    Attributes:
        last: the highest number used so far, those of removed files included.
    """

    def __init__(self, directory: Path, after: int = 0) -> None:
        self._directory = directory
        self._live: set[int] = set()
        self._lost: set[int] = set()
        self._unneeded = {int(match[1]) for name in os.listdir(directory) if (match := _NAME.fullmatch(name))}
        self.last = max(after, 0, *self._unneeded)

    def keep(self, payload: Payload) -> PayloadRef:
        """Write a payload to a file and return its ``PayloadRef``. After the return, it survives this process."""
        self.last += 1
        path, rest = self.path_of(self.last), memoryview(payload)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                while rest:
                    rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise disk_error(self._directory, error) from error
        self._live.add(self.last)
        return PayloadRef(self.last, len(payload), digest_of(payload))

    def read(self, ref: PayloadRef) -> bytes:
        """Return the payload that ``keep`` stored under this ``PayloadRef``.

        Raises:
            DamagedPayloadError: the payload can't be read, or its bytes are damaged.
            QueueError: the payload was released.
        """
        path = self.path_of(ref.number)
        if ref.number in self._lost:
            raise DamagedPayloadError(f"{path}: the file is missing or too short, so a payload is lost", str(path))
        self._check_live(ref)
        try:
            payload = path.read_bytes()
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise disk_error(self._directory, error) from error
            raise DamagedPayloadError(f"{path}: {error}", str(path)) from error
        if len(payload) != ref.length or digest_of(payload) != ref.digest:
            raise DamagedPayloadError(
                f"{path}: expected a group of {ref.length} bytes with digest {ref.digest:016x}, got {len(payload)} "
                f"bytes with {digest_of(payload):016x}; it is damaged", str(path)
            )  # fmt: skip
        return payload

    def release(self, ref: PayloadRef) -> None:
        """Give up a payload. Its file stays until ``settle`` removes it.

        Raises:
            QueueError: the payload was released before, or is unknown.
        """
        if ref.number in self._lost:
            self._lost.discard(ref.number)
        else:
            self._check_live(ref)
            self._live.discard(ref.number)
        self._unneeded.add(ref.number)

    def adopt(self, refs: Iterable[PayloadRef]) -> list[Path]:
        """Keep payloads that an earlier process wrote.

        Return the files that are missing or too short. Their payloads are lost.
        """
        for ref in refs:
            try:
                is_whole = self.path_of(ref.number).stat().st_size >= ref.length
            except OSError:
                is_whole = False
            (self._live if is_whole else self._lost).add(ref.number)
        self._unneeded -= self._live
        return [self.path_of(number) for number in sorted(self._lost)]

    def settle(self) -> None:
        """Remove the files that are not needed any more, after a commit."""
        try:
            while self._unneeded:
                number = self._unneeded.pop()
                try:
                    self.path_of(number).unlink(missing_ok=True)
                except OSError:
                    self._unneeded.add(number)
                    raise
        except OSError as error:
            raise disk_error(self._directory, error) from error

    def path_of(self, number: int) -> Path:
        """Return the path of the file with this number. The file need not exist."""
        return self._directory / f"group-{number:010d}"

    def _check_live(self, ref: PayloadRef) -> None:
        if ref.number not in self._live:
            raise QueueError(
                f"{self.path_of(ref.number)}: expected a live group, got none: it was released, or not adopted after a "
                f"restart; this is a bug in async-rl, please report it"
            )


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
