"""A folder of an object store, by its fsspec URL. A copy counts once its bytes were read back and compared.

Every failure of a store raises ``StoreError`` with a text that has no credentials.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from async_rl.errors import ConfigError, RunError, StoreError
from async_rl.learner.checkpoints.digests import Entry
from async_rl.redaction import redacted

_CHUNK_BYTES = 4 << 20
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Protocol -> the extra of async-rl that has its package."""


class Store:
    """The objects below a URL, with names relative to it. Several threads may use one store.

    The constructor raises ConfigError if the package for this kind of URL is missing, or there is no such kind.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # takes a quarter of a second

        self.url, protocol = url.rstrip("/"), url.partition("://")[0]
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            remedy = f"pip install 'async-rl[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else scrubbed(error)
            raise ConfigError(f"checkpoint.mirror: {protocol}:// needs a package that is missing: {remedy}") from None
        except ValueError as error:
            raise ConfigError(f"checkpoint.mirror: expected a URL that fsspec knows, got {scrubbed(error)}") from None
        self._root = root.rstrip("/")
        self._fs.auto_mkdir = True  # of a local directory

    def put(self, path: Path, name: str, expected: Entry | None = None) -> Entry:
        """Copy a file to the object ``name`` unless it is there, and compare. Return the file's size and digest.

        Of a file that grows meanwhile, the bytes that it has now are copied. ``expected`` is what the file should be.
        Raises RunError if it is something else.
        """
        with path.open("rb") as source:
            entry = _entry_of(source, os.fstat(source.fileno()).st_size)
            if expected is not None and entry != tuple(expected):
                raise RunError(f"{path}: expected the digest {expected[1]}, got {entry[1]}")
            with self._errors(name):
                if not self._has(name, entry):
                    source.seek(0)
                    with self._fs.open(self._at(name), "wb") as target:
                        for chunk in _chunks(source, entry[0]):
                            target.write(chunk)
                    if not self._has(name, entry):
                        raise StoreError(f"checkpoint.mirror: {self.url}/{name}: the copy differs from {path}")
        return entry

    def get(self, name: str, path: Path, expected: Entry) -> None:
        """Copy the object ``name`` to the file ``path``. Raises StoreError, too, if it is damaged."""
        with self._errors(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(self._at(name), str(path))
            with path.open("rb") as source:
                if (found := _entry_of(source)) != expected:
                    raise ValueError(f"expected the size and digest {expected}, got {found}; it is damaged")

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        with self._errors(name):
            self._fs.pipe_file(self._at(name), data)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if there is none."""
        with self._errors(name), suppress(FileNotFoundError):
            return self._fs.cat_file(self._at(name))
        return None

    def names(self, folder: str) -> list[str]:
        """Return the names of all objects below ``folder``, in order."""
        with self._errors(folder):
            return sorted(str(path).removeprefix(f"{self._root}/") for path in self._fs.find(self._at(folder)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. Some may be gone already."""
        for name in names:
            with self._errors(name), suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

    def check_writable(self) -> None:
        """Write a small object and remove it."""
        self.write("probe", b"async-rl")
        self.remove(["probe"])

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _has(self, name: str, entry: Entry) -> bool:
        with suppress(FileNotFoundError):
            if self._fs.info(self._at(name))["size"] == entry[0]:
                with self._fs.open(self._at(name), "rb", cache_type="none") as source:
                    return _entry_of(source) == entry
        return False

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # every store has exceptions of its own
            raise StoreError(
                f"checkpoint.mirror: {self.url}/{name}: {type(error).__name__}: {scrubbed(error)}"
            ) from None


def scrubbed(error: object) -> str:
    """Return the text of an error in one line of at most 300 characters, without what may be a credential."""
    return redacted(" ".join(str(error).split()))[:300]


def _entry_of(source: Any, size: float = float("inf")) -> Entry:
    digest, count = xxhash.xxh3_128(), 0
    for chunk in _chunks(source, size):
        digest.update(chunk)
        count += len(chunk)
    return count, digest.hexdigest()


def _chunks(source: Any, size: float) -> Iterator[bytes]:
    """Yield the next bytes of a file, at most ``size``."""
    while size and (chunk := source.read(int(min(size, _CHUNK_BYTES)))):
        yield chunk
        size -= len(chunk)
