"""Checkpoints, which are written completely or not at all, and ``TrainerState``, a part of each checkpoint.

::

    checkpoints/
        latest           the name of the newest committed checkpoint, one line
        step-000100/     engine files, extra.msgpack (trainer's state, queue's snapshot), hf/ (config, tokenizer),
                         digests.json (``file_digests.py``)
        step-*.damaged-* a checkpoint that was damaged when a learner started (``resume.py``)
        .partial-*/      a checkpoint that is being written, or that a dead process left incomplete

A commit writes files under a temporary name, flushes and renames them, then replaces ``latest``. If the process is
killed at any point, ``latest`` names a complete checkpoint. A step directory beyond ``latest`` is left over from an
unfinished commit and is not valid.

A learner may be stopped at any point and continue after a newer learner has taken over. It can't overwrite the newer
learner's checkpoints: temporary names contain the lineage, the queue confirms the lineage before each rename, and a
commit removes no newer checkpoint. ``remove_leftovers``, which the newer learner calls, removes the older learner's
temporary files, so the older learner's last renames fail.

The trainer and ``sft.py`` write checkpoints on rank 0; the engine adds its files on all ranks
(``stored_tensors.py``). A learner that starts reads all files. ``export.py`` reads only the model, without a process
group.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, cast

import msgpack

from async_rl.config.config import Config
from async_rl.errors import RunError
from async_rl.learner.engine import Engine
from async_rl.learner.file_digests import write_manifest
from async_rl.learner.staleness import BoundState
from async_rl.process.fault_points import fault_point

MODEL_FILES = "hf"
"""Folder of a checkpoint with the model's config and tokenizer."""

_EXTRA = "extra.msgpack"
_LATEST = "latest"
_PARTIAL = ".partial-"
_BUG = "this is a bug in async-rl, please report it"
USE_ANOTHER = "use another checkpoint; a learner resumes from the one that checkpoints/latest names"
CHECK_DISK = "check the disk and its free space; the same command resumes from the last checkpoint"
_STEP = re.compile(r"step-(\d{6,})")


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
        bound_state: the state of an adaptive staleness bound (``staleness.py``).
        exhausted: the data has ended.
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
    bound_state: BoundState | None = None
    exhausted: bool = False

    @property
    def is_resumed(self) -> bool:
        """Whether this start resumes a checkpoint."""
        return bool(self.parent_lineage)

    def fitted(self, config: Config) -> TrainerState:
        """Return the state for a learner start with ``config``, which may have other evaluation sets or another bound
        than the checkpoint's.
        """
        pending = [(name, step) for name, step in self.pending_evals if name in config.data.eval]
        bound = self.bound_state if config.queue.adaptive else None
        if bound is not None and bound.bound > config.queue.max_staleness:
            bound = BoundState(config.queue.max_staleness)
        return replace(self, pending_evals=pending, bound_state=bound)

    def add_digest(self, version: int, digest: str) -> None:
        """Record that this run published ``version`` with this digest of its weights."""
        known = self.digests.get(version, ())
        self.digests[version] = known if digest in known else (*known, digest)

    def fork(self) -> TrainerState:
        """Return the state, under a new lineage, of a new learner start that resumes from this one."""
        return replace(
            self, lineage=uuid.uuid4().hex[:12], parent_lineage=self.lineage, fork_version=self.version,
            digests=dict(self.digests), pending_evals=list(self.pending_evals),
        )  # fmt: skip

    def to_plain(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["digests"] = {str(version): list(digests) for version, digests in self.digests.items()}
        plain["pending_evals"] = [list(item) for item in self.pending_evals]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in plain.items() if key in known}
        values["digests"] = {int(version): tuple(digests) for version, digests in plain["digests"].items()}
        values["pending_evals"] = [(str(name), int(step)) for name, step in plain["pending_evals"]]
        if values.get("bound_state") is not None:
            values["bound_state"] = BoundState(**values["bound_state"])
        return cls(**values)


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint after ``step`` steps."""
    return f"step-{step:06d}"


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
    if newest is not None and _step(newest.name) >= step:
        raise RunError(
            f"expected a checkpoint beyond {newest}, got one of step {step}: checkpoints/latest was edited while the "
            f"learner ran; start the learner again"
        )
    target = root / checkpoint_name(step)
    partial = root / f"{_PARTIAL}{lineage}-{target.name}"
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
    _prune(root, step, keep_last)
    return target


def commit_latest(run_dir: Path, name: str, lineage: str, confirm: Callable[[], None]) -> None:
    """Make ``latest`` name the checkpoint ``name``, atomically and durably. For the arguments see ``write_checkpoint``.

    Raises:
        LineageError: a newer learner has taken over.
    """
    confirm()
    root = run_dir / "checkpoints"
    partial = root / f"{_PARTIAL}{lineage}-{_LATEST}"
    try:
        partial.write_text(f"{name}\n", encoding="utf-8")
        _flush_file(partial)
        confirm()
        os.replace(partial, root / _LATEST)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_directory(root)


def remove_leftovers(run_dir: Path) -> None:
    """Remove unfinished files of older learners: temporary files, and checkpoints beyond ``latest``.

    Call it only while this learner is the run's newest: right after the queue has attached it.
    """
    newest = latest_checkpoint(run_dir)
    newest_step = -1 if newest is None else _step(newest.name)
    root = run_dir / "checkpoints"
    for path in root.iterdir() if root.is_dir() else ():
        is_beyond = _STEP.fullmatch(path.name) is not None and _step(path.name) > newest_step
        if path.name.startswith(_PARTIAL) or is_beyond:
            _remove(path)


def latest_path(run_dir: Path) -> Path:
    """Return the path of the file that names the newest committed checkpoint."""
    return run_dir / "checkpoints" / _LATEST


def read_latest(run_dir: Path) -> str | None:
    """Return the text of the file ``latest``, not checked. None if there is no such file."""
    try:
        return latest_path(run_dir).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the directories that have the name of a checkpoint. Some may be newer than ``latest``, or damaged."""
    root = run_dir / "checkpoints"
    return [p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()] if root.is_dir() else []


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return _step(path.name)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest committed checkpoint of a run. None if there is none yet.

    Raises:
        RunError: the checkpoint that ``latest`` names does not exist.
    """
    root, name = run_dir / "checkpoints", read_latest(run_dir)
    if name is None:
        return None
    if _STEP.fullmatch(name) is None or not (root / name).is_dir():
        there = sorted(p.name for p in root.iterdir() if _STEP.fullmatch(p.name)) or ["none"]
        raise RunError(
            f"{root / _LATEST}: expected the name of a checkpoint in the same directory, got {name!r} (it holds: "
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
    run_dir = {_LATEST: path.parent.parent, "checkpoints": path.parent}.get(path.name, path)
    newest = latest_checkpoint(run_dir)
    if newest is not None:
        return newest
    raise RunError(
        f"expected a checkpoint, or a run directory with checkpoints/latest, got {path}; choose another path"
    )


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


def write_model_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write the model's config and tokenizer files into a checkpoint that is being written."""
    target = directory / MODEL_FILES
    target.mkdir()
    for name, content in files.items():
        (target / name).write_bytes(content)


def _step(name: str) -> int:
    match = _STEP.fullmatch(name)
    if match is None:
        raise ValueError(f"expected a checkpoint name like {checkpoint_name(0)}, got {name!r}; {_BUG}")
    return int(match[1])


def _prune(root: Path, newest_step: int, keep_last: int) -> None:
    steps = {p: _step(p.name) for p in root.iterdir() if _STEP.fullmatch(p.name)}
    committed = sorted((step, path) for path, step in steps.items() if step <= newest_step)
    for _, path in committed[:-keep_last]:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Rename first: if the process dies during the removal, no incomplete checkpoint has a checkpoint's name.
        doomed = path if path.name.startswith(_PARTIAL) else path.with_name(f"{_PARTIAL}removed-{path.name}")
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
