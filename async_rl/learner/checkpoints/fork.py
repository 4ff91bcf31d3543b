"""Fork a run: continue from a checkpoint of another run, in a new run directory and with another config.

``fork_run`` copies the checkpoint into the new directory, and the learner resumes from the copy as from its own. The
fork continues the run's steps, versions and learning rate schedule, with its model, optimizer and place in the data.
Groups that waited in the run's queue are not copied, so the queue of the fork counts them as rolled back and samples
their prompts again. Metrics and evaluations begin anew. A critic goes on like the model, so what it is stays.

Checkpoints are never changed in place, so the large files are hard links if both directories are on one file system.
Nothing is written into the other run's directory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import changed_keys, config_from_toml, is_among
from async_rl.errors import QueueError, RunError
from async_rl.learner.checkpoints.digests import find_damage, renew_entry
from async_rl.learner.checkpoints.files import (
    TrainerState,
    checkpoints_of,
    read_extra,
    resolve_checkpoint,
    run_state,
    write_extra,
)
from async_rl.learner.checkpoints.writer import commit_latest
from async_rl.queue.core.persistence import snapshot_for_other_data
from async_rl.run.directory import RunDir, checkpoint_name, step_of, write_atomically
from async_rl.run.records.starts import read_origin
from async_rl.run.reuse import starts_over

_PLACE_KEYS = (
    "run.seed", "environment", "data.train", "data.source", "data.weights", "data.columns",
    "data.prompt_format", "data.shuffle", "data.on_bad_row", "data.ignore",
)  # fmt: skip
"""Keys and sections on which the order of the prompts depends. If one differs, the fork begins at the first prompt."""
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of a hard link that say that this file system needs a copy."""


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The checkpoint from which a run is forked.

    Attributes:
        checkpoint: its directory.
        run_id: the id of its run.
    """

    checkpoint: Path
    run_id: str

    @property
    def step(self) -> int:
        return step_of(self.checkpoint.name)

    @property
    def run_dir(self) -> Path:
        return self.checkpoint.parent.parent


def named_run(source: str) -> tuple[Path, int | None]:
    """Return the run directory and the step that ``source`` names: ``RUN``, whose step is None, or ``RUN@STEP``."""
    name, separator, number = source.rpartition("@")
    if separator and number.isdecimal() and not Path(source).exists():
        return Path(name), int(number)
    return Path(source), None


def find_fork_point(source: str) -> ForkPoint:
    """Return the checkpoint that ``source`` names: ``RUN`` (its latest one) or ``RUN@STEP``.

    Raises:
        RunError: there is no such checkpoint. The message lists those that exist.
    """
    path, step = named_run(source)
    if not (path / "run_id").is_file():
        raise RunError(f"--from: expected a run directory, or RUN@STEP, got {source!r}; correct the path")
    if step is None:
        checkpoint = resolve_checkpoint(path)
    else:
        checkpoint = path / "checkpoints" / checkpoint_name(step)
        if not checkpoint.is_dir():
            there = sorted(step_of(p.name) for p in checkpoints_of(path))
            raise RunError(
                f"--from: expected a step of which {path} has a checkpoint ({', '.join(map(str, there)) or 'none'}), "
                f"got {step}; name one of these, or keep more with checkpoint.keep_last"
            )
    return ForkPoint(checkpoint, RunDir(path).run_id)


def must_fork(point: ForkPoint, config: Config, *, fresh: bool) -> bool:
    """Return whether the fork is still to be made: False if ``run.dir`` already has it. Write nothing.

    Raises:
        RunError: ``run.dir`` has another run, or ``learner.steps`` leaves nothing to train.
    """
    run_dir = RunDir(Path(config.run.dir))
    if run_dir.path.exists() and run_dir.path.samefile(point.run_dir):
        raise RunError(
            f"run.dir: expected a directory other than that of the run to fork from, got {run_dir.path}; choose "
            f"another run.dir"
        )
    if config.learner.steps <= point.step:
        raise RunError(
            f"learner.steps: expected more than {point.step}, the step of {point.checkpoint}, because a fork goes on "
            f"counting there, got {config.learner.steps}; raise it"
        )
    if fresh or not run_dir.config.exists() or starts_over(run_dir, config):
        return True
    origin = read_origin(
        run_dir,
        f"leave out --from to resume the run in {run_dir.path}, or pass --fresh (the old directory is moved aside)",
    )
    if origin is None and run_dir.metrics.exists():
        raise RunError(
            f"run.dir: {run_dir.path} has a run that was not forked; choose another run.dir, leave out --from to "
            f"resume that run, or pass --fresh (the old directory is moved aside)"
        )
    if origin is not None and (origin.run_id, origin.step) != (point.run_id, point.step):
        raise RunError(
            f"run.dir: {run_dir.path} has a fork of {origin.run_dir} at step {origin.step}, not of "
            f"{point.run_dir} at step {point.step}; name that one in --from, choose another run.dir, or pass --fresh "
            f"(the old directory is moved aside)"
        )
    return run_dir.latest_checkpoint is None


def fork_run(point: ForkPoint, config: Config) -> dict[str, tuple[Any, Any]]:
    """Make the checkpoint of ``point`` the newest one of ``run.dir``, which this process has locked and prepared.

    Return ``section.key`` -> (the checkpoint's value, the value of ``config``) for every key that differs.

    Raises:
        RunError: the checkpoint is damaged or not of a reinforcement learning run, has no critic where one is needed,
            or another one than ``[critic]`` describes; or the files can't be written.
        ConfigError: another version of async-rl wrote the checkpoint's config.
    """
    run_dir = RunDir(Path(config.run.dir))
    if damage := find_damage(point.checkpoint):
        raise RunError(
            f"--from: the checkpoint {point.checkpoint} is damaged: {damage}; name another step, as RUN@STEP"
        )
    extra = read_extra(point.checkpoint)
    if "queue" not in extra:
        raise RunError(
            f"--from: expected a checkpoint of launch or learner, got {point.checkpoint}, which `async-rl sft`, `dpo` "
            f"or `rm` wrote; set model.path to the model that sft or dpo exported, and leave out --from"
        )
    config_toml, state, snapshot = run_state(point.checkpoint, extra)
    old = config_from_toml(config_toml, "the checkpoint's config")
    _check_critic(point, old, config)
    changed = changed_keys(old, config)
    forked = {**extra, **_forked_extra(state, snapshot, config, changed)}
    try:
        source = {"run_dir": str(point.run_dir.absolute()), "run_id": point.run_id, "step": point.step}
        write_atomically(run_dir.origin, json.dumps(source, indent=1) + "\n")
        partial = run_dir.checkpoints / ".partial-fork"
        target = run_dir.checkpoints / point.checkpoint.name
        for remains in (partial, target):  # of the same fork, interrupted
            shutil.rmtree(remains, ignore_errors=True)
        shutil.copytree(point.checkpoint, partial, copy_function=_link_or_copy)
        (partial / "extra.msgpack").unlink()
        write_extra(partial, forked)
        renew_entry(partial, "extra.msgpack")
        partial.rename(target)
        commit_latest(run_dir.path, point.checkpoint.name, "fork", lambda: None)
    except OSError as error:
        raise RunError(
            f"can't copy {point.checkpoint} to {run_dir.checkpoints}: {error}; correct that, and run the same command "
            f"again"
        ) from error
    return changed


def notes_on_models(point: ForkPoint, changed: Mapping[str, tuple[Any, Any]], config: Config) -> list[str]:
    """Return a line for each model of which a fork takes something other than the changed keys seem to say.

    ``changed`` is what ``fork_run`` returned.
    """
    notes: list[str] = []
    if "model.path" in changed:
        notes.append(
            f"the trained weights are those of {point.checkpoint}; model.path gives the fork its tokenizer, the "
            f"model's settings, and the weights that stay frozen (a reference, the base of adapters)"
        )
    if 0 in changed.get("loss.reference_every", ()):
        notes.append("the reference is the model of model.path again, not one that has moved")
    if "loss.advantage" in changed and changed["loss.advantage"][0] == "gae" and not config.loss.has_critic:
        notes.append(f"the critic of {point.checkpoint} is left out")
    return notes


def _check_critic(point: ForkPoint, old: Config, new: Config) -> None:
    """Check that the critic of ``new``, if it has one, is the one of the checkpoint, whose config is ``old``."""
    if not new.loss.has_critic:
        return
    if not old.loss.has_critic:
        raise RunError(
            f"--from: expected the checkpoint of a run with a critic, which loss.advantage = {new.loss.advantage!r} "
            f"needs, got {point.checkpoint}, which has none; leave out --from, and set model.path to what `async-rl "
            f"export {point.checkpoint}` writes"
        )
    if old.critic.path != new.critic.path:
        expected, got = ("no value" if path is None else repr(path) for path in (old.critic.path, new.critic.path))
        raise RunError(
            f"critic.path: expected {expected}, as in the config of {point.checkpoint}, whose critic the fork goes on "
            f"with, got {got}; set it back, or begin with another critic in a run without --from"
        )


def _forked_extra(state: TrainerState, snapshot: bytes, config: Config, changed: Collection[str]) -> dict[str, object]:
    """Return what changes in ``extra`` of a checkpoint for the fork. It evaluates first, so that its curve has a
    beginning.

    ``changed`` are the config keys that differ from the checkpoint's.

    Raises:
        RunError: ``snapshot``, the queue's, is damaged.
    """
    keeps_place = not any(is_among(key, _PLACE_KEYS) for key in changed)
    state = replace(
        state, digests={}, pending_evals=[(name, state.step) for name in config.data.eval], skipped_in_a_row=0,
        critic_skipped_in_a_row=0, exhausted=False,
        first_version=state.version,
    )  # fmt: skip
    try:
        return {"trainer": state.to_plain(), "queue": snapshot if keeps_place else snapshot_for_other_data(snapshot)}
    except QueueError as error:
        raise RunError(f"--from: {error}") from error


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(source, target)
