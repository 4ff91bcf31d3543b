"""The files and names of checkpoints, and ``TrainerState``, a part of each checkpoint.

::

    checkpoints/
        latest           the name of the newest committed checkpoint, one line
        step-000100/     engine files, extra.msgpack (trainer's state, queue's snapshot), hf/ (config, tokenizer),
                         digests.json (``digests.py``); critic/ (engine files, hf/) with a critic
        step-*.damaged-* a checkpoint that was damaged when a learner started (``resume.py``)
        .partial-*/      a checkpoint that is being written, or that a dead process left incomplete

``latest`` names a complete checkpoint at any time. A step directory beyond ``latest`` is left over from an unfinished
commit and is not valid. ``writer.py`` writes and commits checkpoints; the engine adds its files on all ranks
(``stored_tensors.py``). A learner that starts reads all files. ``export/`` reads only the model, without a process
group.
"""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgpack
import msgspec

from async_rl.config.config import Config
from async_rl.errors import RunError
from async_rl.learner.checkpoints.digests import MANIFEST
from async_rl.run.directory import STEP, RunDir

MODEL_FILES = "hf"
"""Folder of a checkpoint with the model's config and tokenizer."""

_EXTRA = "extra.msgpack"
LATEST = "latest"
PARTIAL = ".partial-"
BUG = "this is a bug in async-rl, please report it"
USE_ANOTHER = "use another checkpoint; a learner resumes from the one that checkpoints/latest names"
CHECK_DISK = "check the disk and its free space; the same command resumes from the last checkpoint"


@dataclass(slots=True)
class TrainerState:
    """The trainer's state that survives a restart. The next step begins with the weights of ``version``.

    Attributes:
        lineage, parent_lineage: names of this learner start and of the start whose checkpoint it resumes.
        fork_version: the version of that checkpoint.
        elapsed_s: seconds that the run's learners have run, without the time between learner starts.
        digests: each version that may still be in flight -> the digests it was published with. It has two digests if
            a restart published the same weights with another ``experimental.bucket_bytes``.
        pending_evals: (dataset, step) of evaluations that are requested but not yet written.
        skipped_in_a_row: number of optimizer steps skipped since the last step that was not skipped.
        critic_skipped_in_a_row: the same number of the critic's optimizer steps.
        exhausted: the data has ended.
        first_version: the version at which the run began: 0, or that of the checkpoint from which it was forked.
    """

    step: int = 0
    version: int = 0
    lineage: str = ""
    parent_lineage: str = ""
    fork_version: int = 0
    elapsed_s: float = 0.0
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    pending_evals: list[tuple[str, int]] = field(default_factory=list)
    skipped_in_a_row: int = 0
    critic_skipped_in_a_row: int = 0
    exhausted: bool = False
    first_version: int = 0

    @property
    def is_resumed(self) -> bool:
        """Whether this start resumes a checkpoint."""
        return bool(self.parent_lineage)

    def fitted(self, config: Config) -> TrainerState:
        """Return the state for a learner start with ``config``, which may have other evaluation sets or another bound
        than the checkpoint's.
        """
        pending = [(name, step) for name, step in self.pending_evals if name in config.data.eval]
        return replace(self, pending_evals=pending)

    def add_digest(self, version: int, digest: str) -> None:
        """Record that this run published ``version`` with this digest of its weights."""
        verified = self.digests.get(version, ())
        self.digests[version] = verified if digest in verified else (*verified, digest)

    def fork(self) -> TrainerState:
        """Return the state, under a new lineage, of a new learner start that resumes from this one."""
        return replace(
            self, lineage=uuid.uuid4().hex[:12], parent_lineage=self.lineage, fork_version=self.version,
            digests=dict(self.digests), pending_evals=list(self.pending_evals),
        )  # fmt: skip

    def to_plain(self) -> dict[str, Any]:
        return msgspec.to_builtins(self, str_keys=True)


def model_part(directory: Path, model: str) -> Path:
    """Return where the checkpoint ``directory`` has a model that the engine trains: the policy in the directory itself,
    others in a subdirectory of their name.
    """
    return directory if model == "policy" else directory / model


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the directories that have the name of a checkpoint. Some may be newer than ``latest``, or damaged."""
    root = run_dir / "checkpoints"
    return [p for p in root.iterdir() if STEP.fullmatch(p.name) and p.is_dir()] if root.is_dir() else []


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest committed checkpoint of a run. None if there is none yet.

    Raises:
        RunError: the checkpoint that ``latest`` names does not exist.
    """
    root, name = run_dir / "checkpoints", RunDir(run_dir).latest_checkpoint
    if name is None:
        return None
    if STEP.fullmatch(name) is None or not (root / name).is_dir():
        there = sorted(p.name for p in root.iterdir() if STEP.fullmatch(p.name)) or ["none"]
        raise RunError(
            f"{root / LATEST}: expected the name of a checkpoint in the same directory, got {name!r} (it holds: "
            f"{', '.join(there)}); write the name of a complete checkpoint into this file"
        )
    return root / name


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint of ``path``: a checkpoint directory, ``checkpoints/latest``, or a run directory.

    Raises:
        RunError: there is no checkpoint.
    """
    if (path / _EXTRA).is_file():
        return path
    run_dir = {LATEST: path.parent.parent, "checkpoints": path.parent}.get(path.name, path)
    newest = latest_checkpoint(run_dir)
    if newest is not None:
        return newest
    raise RunError(
        f"expected a checkpoint, or a run directory with checkpoints/latest, got {path}; choose another path"
    )


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Resolve ``path`` as ``resolve_checkpoint`` does, and keep a run from removing this checkpoint in the ``with``
    block.

    A run that goes on removes it with a later checkpoint. On a file system without locks the run may remove it.

    Raises:
        RunError: there is no checkpoint.
    """
    while True:
        checkpoint = resolve_checkpoint(path)
        try:
            file = (checkpoint / MANIFEST).open("rb")
        except OSError:
            if not checkpoint.is_dir():  # it was removed since
                continue
            yield checkpoint  # it is damaged, as its reader will find
            return
        with file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
            if not checkpoint.is_dir():
                continue
            yield checkpoint
            return


@contextmanager
def removing(checkpoint: Path) -> Iterator[bool]:
    """Yield whether ``checkpoint`` may be removed in the ``with`` block: False if a process is ``reading`` it."""
    try:
        file = (checkpoint / MANIFEST).open("rb")
    except OSError:
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # this file system has no locks
            pass
        yield True


def write_extra(directory: Path, extra: Mapping[str, Any]) -> None:
    """Write ``extra`` into a checkpoint that is being written.

    Raises:
        TypeError: ``extra`` is not plain data.
    """
    packed = cast(bytes, msgpack.packb(dict(extra), use_bin_type=True))
    (directory / _EXTRA).write_bytes(packed)


def read_extra(directory: Path) -> dict[str, Any]:
    """Return the data that ``write_extra`` wrote into the checkpoint ``directory``.

    Raises:
        RunError: the file is missing or damaged.
    """
    path = directory / _EXTRA
    try:
        extra = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    except (OSError, ValueError, msgpack.UnpackException) as error:
        raise RunError(f"can't read {path}: {type(error).__name__}: {error}; {USE_ANOTHER}") from error
    if not isinstance(extra, dict):
        raise RunError(f"{path}: expected a map, got {type(extra).__name__}; {USE_ANOTHER}")
    return extra


def run_state(directory: Path, extra: Mapping[str, Any]) -> tuple[str, TrainerState, bytes]:
    """Return the config as TOML, the trainer's state and the queue's snapshot from ``extra`` of the checkpoint
    ``directory`` of a reinforcement learning run.

    Raises:
        RunError: one of them is missing or malformed.
    """
    config, queue, plain = (extra.get(key) for key in ("config", "queue", "trainer"))
    try:
        state = msgspec.convert(plain or None, TrainerState, strict=False)
    except msgspec.ValidationError:
        state = None
    if state is None or not isinstance(config, str) or not isinstance(queue, bytes):
        raise RunError(
            f"{directory / _EXTRA}: expected the config, the trainer's state and the queue's snapshot of a run, got "
            f"other data; {USE_ANOTHER}"
        )
    return config, state, queue


def write_model_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write the model's config and tokenizer files into a checkpoint that is being written."""
    target = directory / MODEL_FILES
    target.mkdir()
    for name, content in files.items():
        (target / name).write_bytes(content)
