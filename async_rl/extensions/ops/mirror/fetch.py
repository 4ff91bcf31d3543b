"""Whether a run may use its mirror, and how it comes back from there to an empty run directory.

The checkpoint wins: in the newest one that the mirror has is the queue's snapshot, and the rows of ``metrics.jsonl``
and ``trained.jsonl`` up to its step are there, too. The learner moves later rows aside, as after any restart. Groups
that waited in the lost queue count as rolled back and are sampled again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.loading import load_run_config
from async_rl.config.run import CheckpointConfig
from async_rl.errors import RunError, StoreError
from async_rl.extensions.ops.mirror.manifest import (
    Manifest,
    checkpoints_in,
    look_for,
    newest_manifest,
    place_of,
    update_status,
)
from async_rl.extensions.ops.mirror.rules import read_local
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.digests import digest_of
from async_rl.learner.checkpoints.files import LATEST
from async_rl.learner.checkpoints.mirror import read_status
from async_rl.output import size_text
from async_rl.run.directory import RunDir, step_of
from async_rl.run.lock import acquire

BEAT_S = 60.0
"""Longest time between two manifests of a process that lives, in seconds."""
SILENT_S = 3 * BEAT_S
"""Without another manifest for so many seconds, by the clock of who waits, the writer of a mirror counts as dead."""
_LOOK_S = 2.0
_NUM_THREADS = 4


def check_mirror(config: Config) -> str:
    """Check that the store can be written to. Return a warning if it can't, and ``run.dir`` has a run that goes on.

    Raises StoreError if it has none, and ConfigError if a package is missing.
    """
    assert config.checkpoint.mirror is not None
    try:
        Store(config.checkpoint.mirror).check_writable()
    except StoreError as error:
        if not RunDir(Path(config.run.dir)).config.exists():
            raise
        return f"{error}; it is tried again while the run goes"
    return ""


def bring_back(config: Config, *, fresh: bool, is_fork: bool = False, show: Callable[[str], None]) -> list[str]:
    """Check that the run of ``config`` may use its mirror. If ``run.dir`` has no run and the mirror has, fetch that.

    Return lines for the user. A run that is in ``run.dir`` goes on if its store can't be reached.

    Raises:
        StoreError: the store can't be reached, and ``run.dir`` has no run.
        RunError: the mirror has another run or a continuation of this one, or another process writes to it.
    """
    assert config.checkpoint.mirror is not None
    store, run_dir = Store(config.checkpoint.mirror), RunDir(Path(config.run.dir))
    show(f"looking at {store.url}")
    if run_dir.config.exists() and not fresh:
        with suppress(StoreError):  # ``check_mirror`` warns
            found = check_mine(store, run_dir, config.checkpoint, show)
            files = {} if found is None else found.files
            lost = len(files) - len(look_for(files, store)[1])
            if read_status(run_dir.path).is_complete and (lost or not files):
                update_status(run_dir.path, is_complete=False)
                return [f"{store.url} lacks {lost or 'all'} files of the run, which are copied now"]
        return []
    if (found := newest_manifest(store)) is None:
        return []
    if fresh or is_fork:
        raise RunError(
            f"checkpoint.mirror: expected an empty place for a new run, got {store.url}, which has a run up to "
            f"{found.latest or 'its first steps'}; name another URL, or leave out --fresh and --from"
        )
    found = _await_silence(store, found, show)
    lock = acquire(run_dir, "launch")
    try:
        return fetch(store, found, run_dir, show)
    except OSError as error:
        raise RunError(f"run.dir: can't write to {run_dir.path}: {error}; choose another run.dir") from error
    finally:
        lock.close()


def check_mine(store: Store, run_dir: RunDir, config: CheckpointConfig, show: Callable[[str], None]) -> Manifest | None:
    """Return the newest manifest, which is of the run in ``run_dir``, as far as this knows it. None if there is none.

    The caller has locked ``run_dir``, or does so before it writes to the mirror. So if this same directory wrote the
    manifest, its writer is dead. Otherwise wait until that is seen.

    Raises:
        StoreError: the store can't be reached.
        RunError: the mirror has another run, or this one as another directory continued it, or more of it than is here;
            or another process writes to it.
    """
    if (found := newest_manifest(store)) is None:
        return None
    if found.run_id != run_dir.run_id:
        raise RunError(
            f"checkpoint.mirror: expected the run {run_dir.run_id} of {run_dir.path} in {store.url}, got the run "
            f"{found.run_id}, which {found.writer} wrote; name another URL"
        )
    known, local = read_status(run_dir.path), read_local(run_dir)
    if found.name == known.fetched:
        return found
    if found.directory != known.directory:
        raise RunError(
            f"checkpoint.mirror: {found.writer} has continued the run in {store.url} from another directory, up to "
            f"{found.latest}, and {run_dir.path} has {local.latest or 'no checkpoint'} of its own; to go on from the "
            f"mirror, name an empty run.dir, and to go on from here, another URL"
        )
    is_here = known.place == place_of(run_dir)
    newest, folder = next(reversed(checkpoints_in(found.files).items()), ("", ""))
    is_ahead = step_of(newest) > step_of(local.latest) and folder not in local.damaged
    end, own = found.files.get("finished.json"), run_dir.finished_marker
    has_ended = not is_here and end is not None and not (own.is_file() and digest_of(own) == end.entry)
    if step_of(newest) > config.mirror_may_lose and (is_ahead or has_ended):
        raise RunError(
            f"checkpoint.mirror: {store.url} has the {'' if is_ahead else 'finished '}run up to {newest}, and "
            f"{run_dir.path}, which may be a copy or a backup, up to {local.latest or 'no checkpoint'}; "
            f"{remedies(newest)}"
        )
    if not is_here:
        if _await_silence(store, found, show) != found:
            return check_mine(store, run_dir, config, show)
        update_status(run_dir.path, fetched=found.name)
    return found


def remedies(newest: str) -> str:
    """Return what the user can do if a mirror has the checkpoint ``newest`` and the run directory has not."""
    return (
        f"to go on from the mirror, name an empty run.dir; to go on from here, and let its checkpoints be removed, "
        f"--set checkpoint.mirror_may_lose={step_of(newest)}"
    )


def _await_silence(store: Store, found: Manifest, show: Callable[[str], None]) -> Manifest:
    """Wait until the writer of ``found``, the newest manifest, is seen to have ended, and return the newest then.

    It has ended if that says so, or if no other is written while the clock here runs for ``SILENT_S``. No other clock
    counts, no host name and no process id. Raises RunError if another is written.
    """
    end = time.monotonic() + SILENT_S
    while not found.has_ended and (left := end - time.monotonic()) > 0:
        show(f"waiting up to {left:.0f} s: {found.writer}, which wrote to {store.url}, may have ended")
        time.sleep(min(_LOOK_S, left))
        found, before = newest_manifest(store) or found, found
        if found != before and not found.has_ended:
            raise RunError(f"checkpoint.mirror: {found.writer} writes to {store.url}; stop it, or name another URL")
    return found


def fetch(store: Store, found: Manifest, run_dir: RunDir, show: Callable[[str], None]) -> list[str]:
    """Fetch a run into ``run_dir``, which has none and is locked. Return lines for the user.

    If this is killed, ``run_dir`` still has no run. A checkpoint that is damaged in the store is left out, and the one
    before it taken.

    Raises:
        StoreError: the store fails, no checkpoint is whole, or the files are not those of a run.
        ConfigError: this version can't read the run's config.
    """
    partial, latest, lines = run_dir.path / ".mirror-fetch", None, list[str]()
    shutil.rmtree(partial, ignore_errors=True)
    _get(store, found, "", partial, show)
    if not {"config.toml", "run_id"} <= found.files.keys() or RunDir(partial).run_id != found.run_id:
        raise StoreError(f"{store.url}/{found.name}: expected the config and the id of a run, got others or none")
    load_run_config(RunDir(partial).config)
    for name in reversed(checkpoints_in(found.files)):
        try:
            _get(store, found, f"checkpoints/{name}/", partial, show)
        except StoreError as error:
            lines.append(f"warning: the mirror's checkpoint {name} is left out: {error}")
            shutil.rmtree(partial / "checkpoints", ignore_errors=True)
        else:
            latest = name
            (partial / "checkpoints" / LATEST).write_text(f"{name}\n", encoding="utf-8")
            break
    if latest is None and lines:
        raise StoreError(f"no checkpoint of the run in {store.url} is whole: {'; '.join(lines)}")
    update_status(partial, url=store.url, fetched=found.name, latest=latest)
    # The config makes the directory one of a run, so it comes last.
    for path in sorted(partial.iterdir(), key=lambda path: path.name == run_dir.config.name):
        if (target := run_dir.path / path.name).is_dir():  # left by a fetch that was killed
            shutil.rmtree(target)
        os.replace(path, target)
    partial.rmdir()
    return [*lines, f"fetched the run from {store.url}: {latest or 'no checkpoint'}, which {found.writer} wrote"]


def _get(store: Store, found: Manifest, folder: str, target: Path, show: Callable[[str], None]) -> None:
    """Fetch the files of ``folder`` into the directory ``target``; if empty, those of no checkpoint."""
    files = {
        name: one for name, one in found.files.items() if name.startswith(folder or "checkpoints/") == bool(folder)
    }
    size = size_text(sum(one.entry[0] for one in files.values()))
    show(f"fetching {len(files)} files, {size}, from {store.url}/{folder}")
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fetch") as threads:
        tasks = [threads.submit(store.get, one.object, target / name, one.entry) for name, one in files.items()]
    for task in tasks:
        task.result()
