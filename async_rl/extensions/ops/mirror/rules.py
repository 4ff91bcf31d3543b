"""What becomes of each checkpoint of a mirror at a copy of its run directory. Pure; docs/reliability.md has the table.

Checkpoints are told apart by folder: NAME-DIGEST, with the first digits of the digest of their ``digests.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from async_rl.config.run import CheckpointConfig
from async_rl.learner.checkpoints.digests import MANIFEST, digest_of
from async_rl.run.directory import STEP, RunDir, step_of


class Local(NamedTuple):
    """The checkpoints of a run directory.

    Attributes:
        latest: the name of the newest; None if there is none. If the file ``latest`` names none, that with the highest
            step, as for a learner that resumes.
        folders: name -> folder, of those that are there.
        damaged: folders of those that a learner found damaged, and went back.
    """

    latest: str | None
    folders: Mapping[str, str]
    damaged: frozenset[str]


def folder_of(checkpoint: Path) -> str:
    """Return the folder of a checkpoint in a mirror. Raises OSError if its manifest can't be read."""
    return f"{checkpoint.name.partition('.')[0]}-{digest_of(checkpoint / MANIFEST)[1][:12]}"


def read_local(run_dir: RunDir) -> Local:
    """Read which checkpoints are in a run directory: their names and the digests of their manifests."""
    folders: dict[str, str] = {}
    for path in run_dir.checkpoints.glob(f"step-*/{MANIFEST}"):
        with suppress(OSError):  # it was removed since, or is damaged, as its reader will find
            folders[path.parent.name] = folder_of(path.parent)
    there = {name: folder for name, folder in folders.items() if STEP.fullmatch(name)}
    latest = run_dir.latest_checkpoint
    if latest not in there:
        latest = max(there, key=step_of, default=None)
    return Local(latest, there, frozenset(folders.values()) - frozenset(there.values()))


def decide(mirrored: Mapping[str, str], local: Local, config: CheckpointConfig) -> tuple[set[str], set[str]]:
    """Decide what becomes of the checkpoints ``mirrored``, name -> folder, once the mirror has the newest of ``local``.

    Returns:
        The names of those that the next manifest lists, and the folders of those that are not of the run's history any
        more, and are kept until the user gives them up. The others are removed.
    """
    newest = step_of(local.latest)
    lost = {
        name: folder
        for name, folder in mirrored.items()
        if step_of(name) > newest or folder in local.damaged or local.folders.get(name, folder) != folder
    }
    steps = sorted({newest, *(step_of(name) for name in mirrored.keys() - lost.keys())})
    every = config.keep_every
    stay = {*steps[-config.keep_last :], *(step for step in steps if every and step % every == 0)}
    listed = {name for name in mirrored.keys() - lost.keys() if step_of(name) in stay}
    return listed, {folder for folder in lost.values() if step_of(folder) > config.mirror_may_lose}
