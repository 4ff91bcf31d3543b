"""The journal's index: an SQLite database of small records, which is checked as a whole when it is opened.

Every value begins with a checksum of its key and its content, because SQLite only notices damage to its own structure.
If the index is damaged, ``Journal`` calls ``move_aside`` and begins an empty index. SQLite ignores damage at the end of
its own log. The index then has the content of an earlier commit, which can't be noticed here.

Tables: ``meta`` (text), ``state`` (byte strings by name), ``entries`` (records by kind and key).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from async_rl.errors import ConfigError, DamagedJournalError
from async_rl.run.directory import unused

INDEX = "index.sqlite"
_START_OVER = "rename that directory, or start the queue with --fresh, which renames it and begins with an empty queue"
_FORMAT = 8
"""Format number of the index. Increase it with every change of the tables, of the kinds and fields of records, or of
the wire format, in which the payloads are."""
_DIGEST_BYTES = 8
_WRITE_VERSION_AT = 18
_NO_DAMAGE = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_INTERRUPT,
})  # fmt: skip
"""SQLite's error codes that say nothing about the content of the index. All other codes mean that it is damaged."""
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


def seal(data: bytes, *key: str) -> bytes:
    """Return ``data`` with a checksum in front that covers ``data`` and the record's key."""
    return _digest(data, key) + data


def _digest(data: bytes, key: Iterable[str]) -> bytes:
    return xxhash.xxh3_64_digest("\0".join(key).encode() + b"\0" + data)


_SCHEMA = f"""
    BEGIN;
    CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
    CREATE TABLE state (name TEXT PRIMARY KEY, value BLOB);
    CREATE TABLE entries (kind TEXT, key TEXT, fields BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID;
    INSERT INTO meta VALUES ('format', X'{seal(str(_FORMAT).encode(), "format").hex()}');
    PRAGMA user_version = {_FORMAT};
    COMMIT;
"""


def open_index(directory: Path, identity: str) -> sqlite3.Connection:
    """Open and check the index of the journal in ``directory``. Create the index if there is none.

    ``identity`` names the run of the journal.

    Raises:
        ConfigError: the index has another identity or format.
        sqlite3.Error, DamagedJournalError: the index can't be used. ``is_damage`` says whether it is damaged.
    """
    path = directory / INDEX
    # The server may be built in one thread and run in another.
    index = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            index.execute(f"PRAGMA {pragma}")
        (num_tables,) = index.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not num_tables:
            index.executescript(_SCHEMA)
        _check(index, path)
        stored = read_meta(index, "identity")
        if stored is None and identity:
            write_meta(index, "identity", identity)
        if stored and identity and stored != identity:
            raise ConfigError(
                f"{path}: expected the journal of run {identity!r}, got that of run {stored!r}; {_START_OVER}"
            )
    except BaseException:
        index.close()
        raise
    return index


def _check(index: sqlite3.Connection, path: Path) -> None:
    """Check the structure of the database and the checksum of every record.

    Raises:
        ConfigError: the index has another format.
        sqlite3.Error, DamagedJournalError: the index is damaged.
    """
    (structure,) = index.execute("PRAGMA quick_check(1)").fetchone()
    if structure != "ok":
        raise DamagedJournalError(structure)
    (number,) = index.execute("PRAGMA user_version").fetchone()
    written = read_meta(index, "format")
    if written is not None and written != str(number):
        raise DamagedJournalError(f"expected format {written}, got {number}")
    if number != _FORMAT:
        raise ConfigError(
            f"{path}: expected a journal of format {_FORMAT}, got format {number}, which another version of async-rl "
            f"wrote; {_START_OVER}"
        )
    if written is None:
        raise DamagedJournalError("its format is missing")
    for name in ("identity", "last_file"):
        read_meta(index, name)
    for _ in read_entries(index):
        pass
    read_state(index)
    write_meta(index, "format", str(_FORMAT))  # fails if the file's header allows no writes


def is_damage(error: Exception, directory: Path) -> bool:
    """Return whether an error of ``open_index`` means that the index is damaged, not just that it can't be accessed."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF == sqlite3.SQLITE_READONLY:
        # SQLite says so of missing permissions, of a disk that failed for a moment, and of a damaged header.
        return _header_forbids_writes(directory / INDEX)
    return code is None or code & 0xFF not in _NO_DAMAGE


def _header_forbids_writes(path: Path) -> bool:
    """Return whether the "write version" in a database's header is one with which SQLite opens a file only to read it.

    Source: the SQLite database file format, byte 18 of the header: 1 (rollback journal) or 2 (WAL) can be written.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        header = file.read(_WRITE_VERSION_AT + 1)
    return len(header) <= _WRITE_VERSION_AT or header[_WRITE_VERSION_AT] not in (1, 2)


def move_aside(directory: Path, reason: str) -> str:
    """Rename the index and its log to ``NAME.damaged-N``. Return a sentence for the log that says so.

    Raises OSError.
    """
    aside = (directory / INDEX).rename(unused(directory / f"{INDEX}.damaged"))
    # If this process dies here: SQLite removes a log without an index.
    log = directory / f"{INDEX}-wal"
    if log.exists():
        log.rename(aside.with_name(f"{aside.name}-wal"))
    return f"{directory / INDEX} is damaged ({reason}) and is moved aside to {aside.name}"


# Records.


@contextmanager
def transaction(index: sqlite3.Connection) -> Iterator[None]:
    index.execute("BEGIN")
    try:
        yield
        index.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors.
        if index.in_transaction:
            index.execute("ROLLBACK")
        raise


def read_entries(index: sqlite3.Connection) -> Iterator[tuple[str, str, bytes]]:
    """Yield the kind, key and content of every record.

    Raises:
        DamagedJournalError: a checksum does not match.
    """
    for kind, key, fields in index.execute("SELECT kind, key, fields FROM entries"):
        yield kind, key, _unseal(fields, kind, key)


def read_state(index: sqlite3.Connection) -> dict[str, bytes]:
    """Return the byte strings of the table ``state`` by name.

    Raises:
        DamagedJournalError: a checksum does not match.
    """
    return {name: _unseal(value, name) for name, value in index.execute("SELECT name, value FROM state")}


def read_meta(index: sqlite3.Connection, name: str) -> str | None:
    """Return the text that ``write_meta`` wrote under ``name``; None if there is none.

    Raises:
        DamagedJournalError: the checksum does not match.
    """
    row = index.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if row is None else _unseal(row[0], name).decode()


def write_meta(index: sqlite3.Connection, name: str, value: str) -> None:
    index.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, seal(value.encode(), name)))


def _unseal(sealed: Any, *key: Any) -> bytes:
    """Return the data that ``seal`` got, after a check of the checksum.

    Raises:
        DamagedJournalError: the checksum does not match.
    """
    if not isinstance(sealed, bytes) or not all(isinstance(part, str) for part in key):
        raise DamagedJournalError("a record has values of wrong types")
    data = sealed[_DIGEST_BYTES:]
    if sealed[:_DIGEST_BYTES] != _digest(data, key):
        raise DamagedJournalError(f"the record {'/'.join(key)!r} does not match its checksum")
    return data
