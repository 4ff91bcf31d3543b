"""Finds the checkpoint from which a learner continues: the newest one that is not damaged.

A checkpoint is whole (not damaged) if its files have the digests that were written with it (``digests.py``). If
the newest one is damaged, or the file ``latest`` does not name one, the learner goes back to the one before it. Model,
trainer and queue go back together, because the queue's snapshot is part of the checkpoint.

``find_resume_point`` only reads. ``take_over`` changes the files, when the queue has accepted the learner: damaged
checkpoints are renamed to ``NAME.damaged-N``, and ``latest`` then names the checkpoint from which the learner
continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import LineageError, RunError
from async_rl.learner.checkpoints.digests import find_damage
from async_rl.learner.checkpoints.files import LATEST, checkpoints_of
from async_rl.learner.checkpoints.mirror import mirror_line
from async_rl.learner.checkpoints.writer import commit_latest, remove_leftovers
from async_rl.run.directory import RunDir, step_of, unused

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """From where a learner continues.

    Attributes:
        checkpoint: the checkpoint. None if the run has none, so that it begins at step 0.
        latest: the text of the file ``latest`` when it was read. None if there was no such file.
        damaged: damaged checkpoints that are newer than ``checkpoint``.
    """

    checkpoint: Path | None
    latest: str | None = None
    damaged: tuple[Path, ...] = ()


def find_resume_point(run_dir: Path) -> ResumePoint:
    """Find the newest checkpoint of a run that is not damaged. Its files are read completely.

    Raises:
        RunError: there are checkpoints, or ``latest`` says so, but all are damaged. It names the mirror of the run.
    """
    while True:
        latest = RunDir(run_dir).latest_checkpoint
        point, causes = _newest_whole(run_dir, latest)
        # Another learner may remove old checkpoints meanwhile.
        if not causes or RunDir(run_dir).latest_checkpoint == latest:
            break
    for cause in causes:
        logger.warning("%s", cause)
    if causes and point.checkpoint is None:
        mirror = mirror_line(RunDir(run_dir))
        raise RunError(
            f"no checkpoint of {run_dir} is whole: {'; '.join(causes)}. "
            f"{f'The mirror {mirror}; to go on from there, name an empty run.dir. ' if mirror else ''}"
            f"Put back an undamaged copy of these files, or start over with --fresh (the old directory is moved aside) "
            f"or in another run.dir"
        )
    if causes:
        logger.warning("going back to the checkpoint before it, %s", point.checkpoint)
    return point


def _newest_whole(run_dir: Path, latest: str | None) -> tuple[ResumePoint, list[str]]:
    """Return the newest checkpoint that is not damaged, and a sentence for each damage that was found."""
    causes: list[str] = []
    latest_file = run_dir / "checkpoints" / LATEST
    steps = {path.name: path for path in checkpoints_of(run_dir)}
    candidates = sorted(steps.values(), key=lambda path: step_of(path.name), reverse=True)
    if latest in steps:
        # Newer ones are left over from unfinished commits.
        candidates = candidates[candidates.index(steps[latest]) :]
    elif latest is not None:
        there = ", ".join(sorted(steps)) or "none"
        causes.append(f"{latest_file}: expected the name of a checkpoint (there are: {there}), got {latest!r}")
    elif candidates:
        causes.append(f"{latest_file} is missing, although there are checkpoints")
    damaged: list[Path] = []
    for path in candidates:
        damage = find_damage(path)
        if not damage:
            return ResumePoint(path, latest, tuple(damaged)), causes
        causes.append(f"the checkpoint {path.name} is damaged: {damage}")
        damaged.append(path)
    return ResumePoint(None, latest, tuple(damaged)), causes


def take_over(run_dir: Path, point: ResumePoint, *, lineage: str, confirm: Callable[[], None]) -> None:
    """Let ``latest`` name the checkpoint of ``point``, rename damaged ones, and remove unfinished files of older
    learners.

    Args:
        run_dir: the run directory.
        point: what ``find_resume_point`` returned.
        lineage: a name that no other learner start has.
        confirm: raises LineageError if a newer learner has taken over.

    Raises:
        LineageError: another learner has committed a checkpoint since ``point`` was found, or has taken over.
    """
    if (now := RunDir(run_dir).latest_checkpoint) != point.latest:
        raise LineageError(
            f"expected {point.latest or 'none'} as the latest checkpoint, got {now}, which another learner wrote "
            f"while this one started; start only one learner"
        )
    for path in point.damaged:
        confirm()
        aside = path.rename(unused(path.with_name(f"{path.name}.damaged")))
        logger.warning("the damaged checkpoint is kept as %s; delete it when you no longer need it", aside)
    if point.checkpoint is not None and point.checkpoint.name != point.latest:
        commit_latest(run_dir, point.checkpoint.name, lineage, confirm)
    remove_leftovers(run_dir)
