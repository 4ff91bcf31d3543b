"""Writes checkpoints, completely or not at all, and removes old ones.

A commit writes files under a temporary name, flushes and renames them, then replaces ``latest``. If the process is
killed at any point, ``latest`` names a complete checkpoint. A step directory beyond ``latest`` is left over from an
unfinished commit and is not valid.

A learner may be stopped at any point and continue after a newer learner has taken over. It can't overwrite the newer
learner's checkpoints: temporary names contain the lineage, the queue confirms the lineage before each rename, and a
commit removes no newer checkpoint. ``remove_leftovers``, which the newer learner calls, removes the older learner's
temporary files, so the older learner's last renames fail.

The trainer and ``sft.py`` call this on rank 0.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_rl.errors import RunError
from async_rl.learner.checkpoint import (
    CHECK_DISK,
    LATEST,
    PARTIAL,
    STEP,
    checkpoint_name,
    checkpoint_step,
    checkpoints_of,
    latest_checkpoint,
)
from async_rl.learner.engine import Engine
from async_rl.learner.file_digests import write_manifest
from async_rl.process.fault_points import fault_point


def write_checkpoint(
    engine: Engine, run_dir: Path, step: int, extra: Mapping[str, Any], *, keep_last: int, lineage: str,
    confirm: Callable[[], None],
) -> Path:  # fmt: skip
    """Save the engine and ``extra`` as the checkpoint of ``step``, and commit it. Returns its directory.

    Afterwards only the newest ``keep_last`` checkpoints (at least 1) up to ``step`` are left. ``extra`` is plain data
    (numbers, text, bytes, lists, maps); ``read_extra`` returns it.

    Args:
        lineage: a name that no other learner start has.
        confirm: raises LineageError if a newer learner has taken over.

    Raises:
        LineageError: a newer learner has taken over. Its ``latest`` and its checkpoints are unchanged.
        RunError: ``latest`` already names ``step`` or a later step, or the files can't be written.
        TypeError: ``extra`` is not plain data.
    """
    confirm()
    root = run_dir / "checkpoints"
    newest = latest_checkpoint(run_dir)
    if newest is not None and checkpoint_step(newest) >= step:
        raise RunError(
            f"expected a checkpoint beyond {newest}, got one of step {step}: checkpoints/latest was edited while the "
            f"learner ran; start the learner again"
        )
    target = root / checkpoint_name(step)
    partial = root / f"{PARTIAL}{lineage}-{target.name}"
    partial.mkdir(parents=True)
    try:
        engine.save(partial, extra)
        write_manifest(partial)
        _flush(partial)
        fault_point("learner.checkpoint_saved")
        confirm()
        os.rename(partial, target)  # fails if the target exists, so another learner's checkpoint is never replaced
        _flush_directory(root)
        fault_point("learner.checkpoint_written")
        commit_latest(run_dir, target.name, lineage, confirm)
    except Exception as error:
        confirm()  # raises if the cause is a newer learner, which removes the partial files
        if isinstance(error, OSError):
            raise RunError(f"can't write the checkpoint {target}: {error}; {CHECK_DISK}") from error
        raise
    _prune(run_dir, step, keep_last)
    return target


def commit_latest(run_dir: Path, name: str, lineage: str, confirm: Callable[[], None]) -> None:
    """Make ``latest`` name the checkpoint ``name``, atomically and durably. For the arguments see ``write_checkpoint``.

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
    newest_step = -1 if newest is None else checkpoint_step(newest)
    root = run_dir / "checkpoints"
    for path in root.iterdir() if root.is_dir() else ():
        is_beyond = STEP.fullmatch(path.name) is not None and checkpoint_step(path) > newest_step
        if path.name.startswith(PARTIAL) or is_beyond:
            _remove(path)


def _prune(run_dir: Path, newest_step: int, keep_last: int) -> None:
    committed = [path for path in checkpoints_of(run_dir) if checkpoint_step(path) <= newest_step]
    for path in sorted(committed, key=checkpoint_step)[:-keep_last]:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Rename first: if the process dies during the removal, no incomplete checkpoint has a checkpoint's name.
        doomed = path if path.name.startswith(PARTIAL) else path.with_name(f"{PARTIAL}removed-{path.name}")
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
