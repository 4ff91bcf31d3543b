"""What a mirror has: its newest manifest says so. And ``mirror.json``, what a run directory knows of its mirror.

::

    manifests/000007-DIGEST.json      written last; DIGEST is that of its content, so half a manifest never counts
    checkpoints/step-000100-DIGEST/   a checkpoint; DIGEST is that of its digests.json
    files/000007-PROCESS/             files of the run that were new or changed at the seventh manifest

No object is replaced by other bytes, so what the newest manifest lists stays whole while more is copied.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from async_rl.errors import StoreError
from async_rl.learner.mirror.store import Store
from async_rl.run.directory import write_atomically

_NAME = re.compile(r"manifests/\d+-([0-9a-f]{32})\.json")


class Stored(msgspec.Struct, frozen=True):
    """A file in a mirror: its size in bytes and xxh3_128, and the name of its object."""

    entry: tuple[int, str]
    object: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run that a mirror has, and who wrote it.

    Attributes:
        number: counts the manifests of a mirror.
        run_id: the run's.
        directory: an id of the run directory from which it was written.
        host, pid, process: the process that wrote it; ``process`` is an id that no other process has.
        at: when it was written, in seconds since 1970.
        has_ended: that process writes no more.
        latest: the name of the newest checkpoint; None if there is none yet.
        files: path in the run directory -> the file, those of checkpoints included.
    """

    number: int = 0
    run_id: str
    directory: str
    host: str
    pid: int
    process: str
    at: float = 0.0
    has_ended: bool = False
    latest: str | None = None
    files: dict[str, Stored] = {}

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
    """Return the newest manifest that is whole; None if there is none. Raises StoreError."""
    for name in reversed(store.names("manifests")):
        match, data = _NAME.fullmatch(name), store.read(name)
        if match and data is not None and xxhash.xxh3_128_hexdigest(data) == match[1]:
            try:
                return msgspec.json.decode(data, type=Manifest)
            except msgspec.MsgspecError as error:
                raise StoreError(f"{store.url}/{name}: of another version of async-rl: {error}") from None
    return None


def checkpoints_in(files: dict[str, Stored]) -> dict[str, int]:
    """Return name -> step of the checkpoints among ``files``, oldest first."""
    names = {path.split("/")[1] for path in files if path.startswith("checkpoints/")}
    return {name: int(name.removeprefix("step-")) for name in sorted(names)}


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of ``mirror.json`` of a run directory; empty if there is none, or it is damaged.

    Keys: ``url``; ``directory``, an id of the directory; ``fetched``, the manifest from which it came; ``latest``, the
    newest checkpoint that the mirror has; ``behind_steps``, by how many steps the run's own is newer; ``behind_since``,
    a time in seconds since 1970; ``error``, why; ``is_complete``, whether the run has ended and the mirror has all.
    """
    try:
        found = json.loads((run_dir / "mirror.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def update_status(run_dir: Path, **changes: Any) -> None:
    """Change keys of ``mirror.json``."""
    found = read_status(run_dir)
    if found != (changed := {**found, **changes}):
        write_atomically(run_dir / "mirror.json", json.dumps(changed, indent=1) + "\n")
