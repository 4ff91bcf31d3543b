"""Copies a run directory to its mirror, a pass at a time.

A pass copies the newest checkpoint if the mirror lacks it, and the run's other files, writes a manifest of both, and
then removes what that no longer lists. If it is killed before, the mirror has what the manifest before lists.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from async_rl.config.run import CheckpointConfig
from async_rl.errors import LineageError, RunError, StoreError
from async_rl.learner.checkpoints.digests import MANIFEST, Entry, digest_of
from async_rl.learner.checkpoints.files import STEP, checkpoint_step, reading
from async_rl.learner.mirror.fetch import BEAT_S, check_mine
from async_rl.learner.mirror.manifest import (
    FILES,
    FOLDERS,
    Manifest,
    Stored,
    checkpoints_in,
    newest_manifest,
    place_of,
    read_status,
    sign_of_life,
    update_status,
)
from async_rl.learner.mirror.store import Store
from async_rl.process.fault_points import fault_point
from async_rl.run.directory import RunDir

FILES_EVERY_S = 300.0
"""Seconds between two copies of files without a new checkpoint."""
_NUM_THREADS = 4

_Job = tuple[Path, str, Entry | None, Stored | None]
"""What to copy, to which object, its size and digest if they are known, and what the mirror has of it."""


class Copier:
    """Copies one run directory to one store, from one thread. Its methods raise StoreError if the store fails."""

    def __init__(
        self, run_dir: RunDir, store: Store, config: CheckpointConfig, *, files_every_s: float = FILES_EVERY_S
    ) -> None:
        self._run_dir, self._store, self._config = run_dir, store, config
        self._files_every_s, self._files_at = files_every_s, float("-inf")
        self._beat_at = float("-inf")
        known = read_status(run_dir.path)
        if known.url != store.url:  # what is known is about another store
            update_status(run_dir.path, url=store.url, fetched="", latest=None, copied_at=None)
        self._manifest = Manifest(
            run_id=run_dir.run_id, directory=known.directory, host=socket.gethostname(), pid=os.getpid(),
            process=uuid.uuid4().hex[:12],
        )  # fmt: skip

    @property
    def latest(self) -> str | None:
        """The newest checkpoint that the mirror has."""
        return self._manifest.latest

    def begin(self, show: Callable[[str], None]) -> None:
        """Become the process that writes to the mirror. Raises RunError as ``check_mine``, LineageError as ``sync``."""
        found = check_mine(self._store, self._run_dir, show)
        known, place = read_status(self._run_dir.path), place_of(self._run_dir)
        directory = known.directory if known.place == place else uuid.uuid4().hex[:12]
        update_status(self._run_dir.path, directory=directory, place=place)  # before a manifest has it
        self._manifest = replace(self._manifest, directory=directory)
        if found is not None:
            self._commit(after=found, files=found.files, latest=found.latest)

    def sync(self, *, is_last: bool = False) -> bool:
        """Make a pass. Return whether the mirror then has everything.

        Files alone are copied every ``files_every_s`` seconds, and at once if ``is_last``, which ends the passes.
        Raises LineageError if another process writes to the mirror now.
        """
        before, latest = self._manifest, self._run_dir.latest_checkpoint
        latest = latest if latest and STEP.fullmatch(latest) else None
        if latest is None and not (self._run_dir.trained.exists() and self._run_dir.trained.stat().st_size):
            return True  # the run may still be replaced by another one (``run/reuse.py``)
        is_due = is_last or time.monotonic() - self._files_at >= self._files_every_s
        is_new = latest is not None and not self._has(latest)
        if not (is_due or is_new or latest != before.latest):
            self._beat()
            return True
        files = {path: one for path, one in before.files.items() if path.startswith("checkpoints/")}
        if latest is not None and is_new:
            files = {path: one for path, one in files.items() if path.split("/")[1] != latest}
            files |= self._copy_checkpoint(latest)
        self._files_at = time.monotonic()
        run_files = self._copy_files()
        has_all = self._run_dir.latest_checkpoint == latest
        if not has_all:  # a last checkpoint may have come, which must be there before the run counts as finished
            run_files.pop("finished.json", None)
        files = self._without_old(files, latest) | run_files
        if (files, latest) != (before.files, before.latest) or (is_last and has_all):
            self._commit(files=files, latest=latest, has_ended=is_last and has_all)
            listed = {stored.object for stored in files.values()} | {self._manifest.name}
            there = chain.from_iterable(map(self._store.names, ("manifests", "files", "checkpoints")))
            self._store.remove(name for name in there if name not in listed)
        return has_all

    def _has(self, name: str) -> bool:
        stored = self._manifest.files.get(f"checkpoints/{name}/{MANIFEST}")
        return stored is not None and stored.entry == digest_of(self._run_dir.checkpoints / name / MANIFEST)

    def _copy_checkpoint(self, name: str) -> dict[str, Stored]:
        """Copy a checkpoint, which the learner does not remove meanwhile. Return its files."""
        try:
            with reading(self._run_dir.checkpoints / name) as root:
                folder, entries = digest_of(root / MANIFEST)[1][:12], json.loads((root / MANIFEST).read_bytes())
                jobs: dict[str, _Job] = {
                    f"{root.parent.name}/{name}/{file}": (
                        root / file,
                        f"checkpoints/{name}-{folder}/{file}",
                        entry,
                        None,
                    )
                    for file, entry in {**entries, MANIFEST: None}.items()
                }
                return self._copy(jobs)
        except (OSError, RunError, ValueError) as error:
            raise StoreError(f"the checkpoint {name} is damaged, or was removed: {error}") from None

    def _copy_files(self) -> dict[str, Stored]:
        """Copy the run's files that are new or changed. Return all of them."""
        stored = self._manifest.files
        folder = f"files/{self._manifest.number + 1:06d}-{self._manifest.process}"
        names = {path.relative_to(self._run_dir.path).as_posix(): path for path in self._paths()}
        return self._copy({name: (path, f"{folder}/{name}", None, stored.get(name)) for name, path in names.items()})

    def _paths(self) -> Iterator[Path]:
        root = self._run_dir.path
        for path in chain(*map(root.glob, FILES), *((root / folder).rglob("*") for folder in FOLDERS)):
            is_partial = any(part.startswith(".") for part in path.relative_to(root).parts)
            if path.is_file() and not path.is_symlink() and not is_partial:
                yield path

    def _copy(self, jobs: Mapping[str, _Job]) -> dict[str, Stored]:
        def copy(path: Path, name: str, expected: Entry | None, stored: Stored | None) -> Stored:
            state = path.stat()
            if stored and stored.entry == _entry_of(path, state.st_size, state.st_mtime_ns, state.st_ino):
                return stored
            stored = Stored(self._store.put(path, name, expected), name)
            fault_point("mirror.copied")
            return stored

        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mirror") as threads:
            copied = {path: threads.submit(copy, *job) for path, job in jobs.items()}
            while wait(copied.values(), BEAT_S).not_done:
                self._beat()
        return {path: future.result() for path, future in copied.items()}

    def _without_old(self, files: dict[str, Stored], latest: str | None) -> dict[str, Stored]:
        """Return the files without those of checkpoints that ``[checkpoint]`` no longer keeps, or after ``latest``."""
        newest, every = -1 if latest is None else checkpoint_step(Path(latest)), self._config.keep_every
        steps = checkpoints_in(files)
        past = sorted(step for step in steps.values() if step <= newest)
        kept = {*past[-self._config.keep_last :], *(step for step in past if every and step % every == 0)}
        return {path: stored for path, stored in files.items() if steps[path.split("/")[1]] in kept}

    def _beat(self) -> None:
        """Give a sign of life, if one is due and the mirror has something. At Hugging Face each would be a commit."""
        is_due = time.monotonic() - self._beat_at >= BEAT_S and not self._store.url.startswith("hf:")
        if is_due and self._manifest.files:
            self._commit()
        sign_of_life(self._run_dir.path).touch()

    def _commit(self, *, after: Manifest | None = None, **changes: Any) -> None:
        """Write the next manifest, the present one with ``changes``, if the last is this process's, or ``after``.

        Of two processes that do so at once, one finds the other's here, the other at its next call: in time, because
        nothing but the last manifest is removed in between.
        """
        found = self._newest(after)
        number = 1 + max(self._manifest.number, 0 if found is None else found.number)
        manifest = replace(self._manifest, number=number, **changes)
        self._store.write(manifest.name, manifest.encoded)
        if self._newest(after) != manifest:
            raise StoreError(f"checkpoint.mirror: {self._store.url}/{manifest.name}: the store returned other bytes")
        self._manifest, self._beat_at = manifest, time.monotonic()
        self._store.remove([] if found is None else [found.name])

    def _newest(self, after: Manifest | None) -> Manifest | None:
        """Return the newest manifest. Raises LineageError if it is neither this process's nor ``after``."""
        found = newest_manifest(self._store)
        if found not in (None, after) and found.process != self._manifest.process:
            raise LineageError(
                f"checkpoint.mirror: {found.writer} has taken over {self._store.url}, so this run is not mirrored any "
                f"more; stop it, or start it again with another URL"
            )
        return found


@cache
def _entry_of(path: Path, _size: int, _mtime_ns: int, _inode: int) -> Entry:
    """Return the size and digest of a file, which is read once for each state that it has."""
    return digest_of(path)
