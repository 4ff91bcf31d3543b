"""Digests of a checkpoint's files, with which a damaged checkpoint is recognised before it is loaded.

``digests.json`` has the size and the xxh3_128 of every file. While a checkpoint is being written, every rank calls
``write_part`` for the files that it has just written, all ranks at once. Then rank 0 calls ``write_manifest``, which
joins the parts and reads only the small files that no rank has listed. ``find_damage`` compares the files with it.

Cost: every rank reads its own files once more, from the page cache: about 0.2 s per GB, where writing and flushing
take a second or more. A start reads the checkpoint once more, with up to 8 threads. The load that follows finds the
checkpoint in the page cache, if it fits.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from async_rl.errors import RunError

MANIFEST = "digests.json"
_PART = "digests-part-"
_CHUNK_BYTES = 4 << 20
_NUM_THREADS = 8

_DAMAGE = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.ESTALE,
})  # fmt: skip
"""Errors that say that a file is gone or can't be read back. Other errors say nothing about the file."""

Entry = tuple[int, str]
"""Size in bytes, and xxh3_128 as hexadecimal digits."""


def write_part(directory: Path, rank: int, paths: Iterable[Path]) -> None:
    """Write the digests of ``paths``, the files that this rank has written, into ``directory``: the checkpoint, or a
    directory in it.
    """
    entries = {path.relative_to(directory).as_posix(): digest_of(path) for path in paths}
    (directory / f"{_PART}{rank:05d}.json").write_text(json.dumps(entries), encoding="utf-8")


def write_manifest(directory: Path) -> None:
    """Write ``digests.json`` for all files of the checkpoint ``directory``. Call this when all files are written.

    The files of ``write_part`` are read and removed.
    """
    entries: dict[str, Entry] = {}
    for part in directory.rglob(f"{_PART}*"):
        for name, entry in json.loads(part.read_text(encoding="utf-8")).items():
            entries[(part.parent / name).relative_to(directory).as_posix()] = entry
        part.unlink()
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in entries:
            entries[name] = digest_of(path)
    (directory / MANIFEST).write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def renew_entry(directory: Path, name: str) -> None:
    """Correct ``digests.json`` of ``directory`` after the file ``name`` was replaced. The file is replaced, too."""
    path = directory / MANIFEST
    entries = json.loads(path.read_text(encoding="utf-8"))
    entries[name] = digest_of(directory / name)
    path.unlink()  # it may be a hard link
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def find_damage(directory: Path) -> str:
    """Return a description of the first damaged file of a checkpoint, in order of names. Empty if no file is damaged.

    Raises:
        RunError: a file can't be read for a reason that says nothing about its content, such as missing permissions.
    """
    path = directory / MANIFEST
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        entries = {str(name): (int(size), str(digest)) for name, (size, digest) in plain.items()}
    except OSError as error:
        return _damage_by(error, path)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"can't read {path}: {type(error).__name__}: {error}"
    names = sorted(entries)
    if foreign := next((name for name in names if not is_inside(directory, directory / name)), None):
        return f"{path}: expected names of files of the checkpoint, got {foreign!r}, which leads elsewhere"
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="digests") as threads:
        damages = threads.map(lambda name: _damage_of(directory / name, entries[name]), names)
        return next(filter(None, damages), "")


def is_inside(directory: Path, path: Path) -> bool:
    """Return whether ``path``, if it exists, is in ``directory``, also if a part of it is a symbolic link."""
    try:
        return path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError, ValueError):  # a link to itself, or no path at all
        return False


def _damage_of(path: Path, expected: Entry) -> str:
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
            return f"{path}: expected a regular file"
        if size != expected[0]:
            return f"{path}: expected {expected[0]} bytes, got {size}"
        _, digest = digest_of(path)
    except OSError as error:
        return _damage_by(error, path)
    return "" if digest == expected[1] else f"{path}: expected the digest {expected[1]}, got {digest}"


def _damage_by(error: OSError, path: Path) -> str:
    """Return the description of the damage that a failed read of ``path`` shows.

    Raises RunError if the error has another cause, which says nothing about the file.
    """
    if error.errno not in _DAMAGE:
        raise RunError(
            f"can't read {path}: {error.strerror or error}; correct that (permissions, the limit on open files), then "
            f"start again"
        ) from error
    return f"can't read {path}: {error.strerror or error}"


def digest_of(path: Path) -> Entry:
    """Read a file. Return its size in bytes and its digest."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
        return os.fstat(file.fileno()).st_size, digest.hexdigest()
