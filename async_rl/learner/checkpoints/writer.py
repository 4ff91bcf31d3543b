"""Writes checkpoints, completely or not at all, and removes old ones.

A commit writes files under a temporary name, flushes and renames them, then replaces ``latest``. If the process is
killed at any point, ``latest`` names a complete checkpoint. A step directory beyond ``latest`` is left over from an
unfinished commit and is not valid.

A learner may be stopped at any point and continue after a newer learner has taken over. It can't overwrite the newer
learner's checkpoints: temporary names contain the lineage, the queue confirms the lineage before each rename, and a
commit removes no newer checkpoint. ``remove_leftovers``, which the newer learner calls, removes the older learner's
temporary files, so the older learner's last renames fail. What it has made again it removes when it ends.

The trainer, and what trains on given rows, have a ``CheckpointWriter`` on rank 0, which writes in the background.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.run import CheckpointConfig
from async_rl.errors import RunError
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.checkpoints.files import (
    CHECK_DISK,
    LATEST,
    PARTIAL,
    checkpoints_of,
    latest_checkpoint,
    removing,
)
from async_rl.learner.interface import Engine
from async_rl.process.fault_points import fault_point
from async_rl.run.directory import STEP, checkpoint_name, step_of

logger = logging.getLogger(__name__)

_DOOMED = f"{PARTIAL}removed-"
"""What the name of a checkpoint that is being removed begins with."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that is complete.

    Attributes:
        step: its step.
        path: its directory.
        write_s: seconds from the beginning of the save until all files were written and flushed.
    """

    step: int
    path: Path
    write_s: float


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint that is being written. ``files`` has the time, by ``time.monotonic``, when all were written."""

    step: int
    target: Path
    partial: Path
    began_at: float
    files: Future[float]


class CheckpointWriter:
    """Writes the checkpoints of one learner start, at most one at a time, on rank 0.

    ``begin`` returns when the state is copied. A thread then writes, digests and flushes the files. It uses neither the
    queue nor ``latest``: ``poll``, called between two steps, commits the checkpoint when its files are written.
    """

    def __init__(
        self, engine: Engine, run_dir: Path, config: CheckpointConfig, *, lineage: str, confirm: Callable[[], None]
    ) -> None:
        """Prepare, and write nothing.

        Args:
            engine: saves its state.
            run_dir: the run directory.
            config: how many checkpoints stay, and whether they are written in the background.
            lineage: a name that no other learner start has.
            confirm: raises LineageError if a newer learner has taken over.
        """
        self._engine, self._run_dir, self._config = engine, run_dir, config
        self._lineage, self._confirm = lineage, confirm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-files")
        self._begun: _Begun | None = None

    def begin(self, step: int, extra: Mapping[str, Any]) -> None:
        """Begin the checkpoint of ``step``: the engine's state of now, and ``extra``.

        ``extra`` is plain data (numbers, text, bytes, lists, maps) that does not change; ``read_extra`` returns it.
        Unless ``checkpoint.asynchronous`` is set, return only when all files are written.

        Raises:
            LineageError: a newer learner has taken over.
            RunError: ``latest`` already names ``step`` or a later step, or the files can't be written.
            TypeError: ``extra`` is not plain data.
        """
        assert self._begun is None
        self._confirm()
        newest = latest_checkpoint(self._run_dir)
        if newest is not None and step_of(newest.name) >= step:
            raise RunError(
                f"expected a checkpoint beyond {newest}, got one of step {step}: checkpoints/latest was edited while "
                f"the learner ran; start the learner again"
            )
        began_at, root = time.monotonic(), self._run_dir / "checkpoints"
        target = root / checkpoint_name(step)
        partial = root / f"{PARTIAL}{self._lineage}-{target.name}"
        with self._errors_of(target):
            partial.mkdir(parents=True)
            if self._config.asynchronous:
                files = self._thread.submit(_complete, partial, self._engine.begin_save(partial, extra).result)
            else:
                files = Future[float]()
                files.set_result(_complete(partial, lambda: self._engine.save(partial, extra)))
        self._begun = _Begun(step, target, partial, began_at, files)

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that is being written. None if there is none."""
        return None if self._begun is None else self._begun.step

    def is_written(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the files. Return whether none are being written any more."""
        return self._begun is None or not wait([self._begun.files], timeout_s).not_done

    def poll(self) -> Committed | None:
        """Commit the checkpoint if its files are written. Return it, or None if there is nothing to commit yet.

        Afterwards old checkpoints are removed, as the config says.

        Raises:
            LineageError: a newer learner has taken over. Its ``latest`` and its checkpoints are unchanged.
            RunError: the files could not be written.
            TypeError: ``extra`` is not plain data.
        """
        begun = self._begun
        if begun is None or not begun.files.done():
            return None
        self._begun = None
        root = self._run_dir / "checkpoints"
        with self._errors_of(begun.target):
            written_at = begun.files.result()
            fault_point("learner.checkpoint_saved")  # the checkpoint's files are written under their temporary name
            self._confirm()
            # This fails if the target exists, so another learner's checkpoint is never replaced.
            os.rename(begun.partial, begun.target)
            _flush_directory(root)
            # The checkpoint's files are written, `latest` names the one before.
            fault_point("learner.checkpoint_written")
            commit_latest(self._run_dir, begun.target.name, self._lineage, self._confirm)
        _prune(self._run_dir, begun.step, self._config)
        return Committed(begun.step, begun.target, written_at - begun.began_at)

    def close(self) -> None:
        """Wait until nothing is being written, and remove what is not committed.

        After a newer learner has removed it, a thread that went on writing may have made it again.
        """
        self._thread.shutdown()
        for path in (self._run_dir / "checkpoints").glob(f"{PARTIAL}{self._lineage}-*"):
            _try_to_remove(path)

    @contextmanager
    def _errors_of(self, target: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._confirm()  # raises if the cause is a newer learner, which removes the partial files
            if isinstance(error, OSError):
                raise RunError(f"can't write the checkpoint {target}: {error}; {CHECK_DISK}") from error
            raise


def _complete(partial: Path, save: Callable[[], None]) -> float:
    """Write all files of a checkpoint: ``save`` returns when the engine's are written. Return when all were."""
    save()
    # In the background: the engine's files are written, those of rank 0 not all.
    fault_point("learner.checkpoint_writing")
    write_manifest(partial)
    _flush(partial)
    return time.monotonic()


def commit_latest(run_dir: Path, name: str, lineage: str, confirm: Callable[[], None]) -> None:
    """Make ``latest`` name the checkpoint ``name``, atomically and durably. For the arguments see
    ``CheckpointWriter``.

    Raises:
        LineageError: a newer learner has taken over.
    """
    confirm()
    root = run_dir / "checkpoints"
    partial = root / f"{PARTIAL}{lineage}-{LATEST}"
    try:
        partial.write_text(f"{name}\n", encoding="utf-8")
        _flush_file(partial)
        confirm()
        os.replace(partial, root / LATEST)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_directory(root)


def remove_leftovers(run_dir: Path) -> None:
    """Remove unfinished files of older learners: temporary files, and checkpoints beyond ``latest``.

    Call it only while this learner is the run's newest: right after the queue has attached it.
    """
    newest = latest_checkpoint(run_dir)
    newest_step = -1 if newest is None else step_of(newest.name)
    root = run_dir / "checkpoints"
    for path in root.iterdir() if root.is_dir() else ():
        is_beyond = STEP.fullmatch(path.name) is not None and step_of(path.name) > newest_step
        if path.name.startswith(PARTIAL) or is_beyond:
            _try_to_remove(path)
        if is_beyond and path.exists():
            raise RunError(
                f"expected no checkpoint beyond the latest one, got {path}, which can't be moved aside; remove it"
            )


def _prune(run_dir: Path, newest_step: int, config: CheckpointConfig) -> None:
    committed = [path for path in checkpoints_of(run_dir) if step_of(path.name) <= newest_step]
    for path in sorted(committed, key=lambda path: step_of(path.name))[: -config.keep_last]:
        if config.keep_every and step_of(path.name) % config.keep_every == 0:
            continue
        with removing(path) as is_free:
            if is_free:
                _try_to_remove(path)
    for path in (run_dir / "checkpoints").glob(f"{_DOOMED}*"):
        _try_to_remove(path)


def _try_to_remove(path: Path) -> None:
    """Remove a checkpoint or a temporary file. What can't be removed now, as a file that another machine reads over
    NFS, is named and kept; it is tried again after the next checkpoint and at the next start.
    """
    try:
        _remove(path)
    except OSError as error:
        logger.warning("can't remove %s: %s; the run goes on, and tries again later", path, error)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Rename first: if the process dies during the removal, no incomplete checkpoint has a checkpoint's name. An
        # older learner that still writes into it finds no directory.
        doomed = path if path.name.startswith(_DOOMED) else path.with_name(f"{_DOOMED}{path.name}")
        if doomed != path:
            if doomed.exists():
                shutil.rmtree(doomed)
            os.rename(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def _flush(directory: Path) -> None:
    """Flush everything below ``directory`` to the disk: the files first, then the directories that contain them."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            _flush_file(Path(parent) / name)
        _flush_directory(Path(parent))


def _flush_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
