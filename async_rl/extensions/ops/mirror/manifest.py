"""What a mirror has: its newest manifest says so. And how ``mirror.json`` is written, what its run knows of it.

::

    manifests/000007-DIGEST.json      written last; DIGEST is that of its content, so half a manifest never counts
    checkpoints/step-000100-DIGEST/   a checkpoint; DIGEST is that of its digests.json
    files/000007-PROCESS/             files of the run that were new or changed at the seventh manifest

No object is replaced by other bytes, so what the newest manifest lists stays whole while more is copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta
from msgspec.structs import replace

from async_rl.errors import StoreError
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.mirror import read_status, sign_of_life
from async_rl.run.directory import RunDir, step_of, write_atomically

FILES = (
    "run_id", "config.toml", "metrics.jsonl", "trained.jsonl", "config_changes.jsonl", "origin.json", "ledger.json",
    "finished.json", "notes.log", "curve.png", "report.html", "code_digests.json", "logger_id",
    "*.rolled_back-*.jsonl", "*.damaged-*.jsonl",
)  # fmt: skip
FOLDERS = ("rollouts", "eval", "export", "data", "scorers", "offline_eval", "nonfinite", "follow")
"""What of a run is mirrored beside checkpoints. Not the queue's journal: a learner restores the queue from the snapshot
in its checkpoint, and what only the journal has is sampled again. Nor logs, traces and keys."""
_NAME = re.compile(r"manifests/(\d{1,18})-([0-9a-f]{32})\.json")
_PART = r"/(?!\.{1,2}(?:/|\Z))[^/\0]+"
_INNER_PATH = re.compile(rf"(?:checkpoints/step-\d{{6,}}|{'|'.join(FOLDERS)})(?:{_PART}){{1,63}}")
_OBJECT = re.compile(rf"(?:files|checkpoints)(?:{_PART}){{2,66}}")


class Stored(msgspec.Struct, frozen=True):
    """A file in a mirror: its size in bytes and xxh3_128, and the name of its object."""

    entry: tuple[Annotated[int, Meta(ge=0)], str]
    object: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run that a mirror has, and who wrote it.

    Attributes:
        number: counts the manifests of a mirror. Whoever writes to it lives as long as this number grows.
        run_id: the run's.
        directory: an id of the run directory from which it was written.
        host, pid: of the process that wrote it, to be shown.
        process: an id that no other process has.
        has_ended: that process writes no more.
        latest: the name of the newest checkpoint; None if there is none yet.
        files: path in the run directory -> the file, those of checkpoints included.
        kept: folders of checkpoints that are no part of the run any more (``rules.py``).
    """

    number: int = 0
    run_id: str
    directory: str
    host: str
    pid: int
    process: str
    has_ended: bool = False
    latest: str | None = None
    files: dict[str, Stored] = {}
    kept: tuple[str, ...] = ()

    @property
    def encoded(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @property
    def name(self) -> str:
        """The name of the object that holds this manifest."""
        return f"manifests/{self.number:06d}-{xxhash.xxh3_128_hexdigest(self.encoded)}.json"

    @property
    def writer(self) -> str:
        return f"process {self.pid} on {self.host}"


def newest_manifest(store: Store) -> Manifest | None:
    """Return the newest manifest that is whole; None if there is none.

    Raises:
        StoreError: the store can't be reached, or the manifest is none that this version writes.
    """
    for _ in range(10):
        matches = [match for name in store.names("manifests") if (match := _NAME.fullmatch(name))]
        for match in sorted(matches, key=lambda match: (int(match[1]), match[2]), reverse=True):
            if (data := store.read(match[0])) is None:
                break  # another one has replaced it since
            if xxhash.xxh3_128_hexdigest(data) == match[2]:
                return _decoded(data, match, store.url)
        else:
            return None
    raise StoreError(
        f"checkpoint.mirror: {store.url}/manifests: expected objects that can be read, got names without any"
    )


def _decoded(data: bytes, name: re.Match[str], url: str) -> Manifest:
    try:
        found = msgspec.json.decode(data, type=Manifest)
        wrong = next((path for path, one in found.files.items() if not _is_of_a_run(path, one.object)), None)
        if wrong is not None or found.number != int(name[1]):
            raise ValueError(f"expected files of a run and number {name[1]}, got {wrong!r} and {found.number}")
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{url}/{name[0]}: of another version of async-rl, or made by hand: {str(error)[:300]}"
        ) from None
    return found


def _is_of_a_run(path: str, name: str) -> bool:
    """Return whether a mirror may have the file ``path`` of a run directory as the object ``name``."""
    is_known = _INNER_PATH.fullmatch(path) if "/" in path else any(fnmatchcase(path, pattern) for pattern in FILES)
    return bool(is_known and _OBJECT.fullmatch(name))


def checkpoint_in(path: str) -> str:
    """Return the name of the checkpoint to which the file ``path`` of a run directory belongs; empty if to none."""
    return path.split("/")[1] if path.startswith("checkpoints/") else ""


def checkpoints_in(files: Mapping[str, Stored]) -> dict[str, str]:
    """Return name -> folder of the checkpoints among ``files``, oldest first."""
    found = {name: stored.object.split("/")[1] for path, stored in files.items() if (name := checkpoint_in(path))}
    return dict(sorted(found.items(), key=lambda item: step_of(item[0])))


def look_for(files: Mapping[str, Stored], store: Store) -> tuple[set[str], dict[str, Stored]]:
    """Return the names of all objects of a mirror, and those of ``files`` that it has; of a checkpoint all or none.

    Raises StoreError.
    """
    there = {name for folder in ("manifests", "files", "checkpoints") for name in store.names(folder)}
    lost = {checkpoint_in(path) or path for path, stored in files.items() if stored.object not in there}
    return there, {path: stored for path, stored in files.items() if (checkpoint_in(path) or path) not in lost}


def update_status(run_dir: Path, **changes: Any) -> None:
    """Change fields of ``mirror.json``."""
    found = read_status(run_dir)
    if found != (changed := replace(found, **changes)):
        write_atomically(sign_of_life(run_dir), msgspec.json.format(msgspec.json.encode(changed), indent=1).decode())


def place_of(run_dir: RunDir) -> str:
    """Return what tells a run directory from its copies, also on another machine: where its file ``run_id`` is on the
    disk, and since when.
    """
    found = (run_dir.path / "run_id").stat()
    return f"{found.st_ino}-{found.st_ctime_ns}"
