"""Whether a config may use a run directory, and what happens to the run that is there.

=====================================================  ============================================================
the directory has                                      what ``launch`` and ``learner`` do
=====================================================  ============================================================
no run                                                 starts one
a run with the same config                             resumes it
a run whose config differs in keys that may change     resumes it with the new values, from its next step on
a run to which no learner ever attached                replaces its config
a run that made no step                                moves it aside (``NAME.old-N``) and starts a new one
a run that made steps with other values of other keys  refuses, and lists these keys
=====================================================  ============================================================

A finished run goes on if ``learner.steps`` is raised. ``--fresh`` always moves the old run aside. ``lock.py`` moves it,
because it must hold the locks of both directories.
"""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import changed_keys, config_to_toml, is_among, load_run_config, plain_values, show_change
from async_rl.config.section import OnResume, on_resume
from async_rl.errors import ConfigError, RunError
from async_rl.process.user_code import changed_code, stored_digests
from async_rl.run.directory import RunDir, step_of, write_atomically

SHARED: tuple[str, ...] = (
    "queue", "data", "sampling", "eval", "environment", "reward.max_abs", "run.seed", "learner.groups_per_step",
    "learner.updates_per_batch", "learner.epochs_per_batch", "weights.sync_every", "model.routing_replay",
)  # fmt: skip
"""Keys and sections that the queue server and its learner must have in common, except those that are ``Free``."""

_FILES = frozenset({
    "config.toml", "queue.json", "queue", "metrics.jsonl", "trained.jsonl", "ledger.json", "rollouts", "eval",
    "checkpoints", "export", "curve.png", "logs", "finished.json", "run.lock", "wandb", "logger_id",
    "tensorboard", "mlflow", "offline_eval", "run_id", "sft", "rm", "dpo", "scorer", "scorers", "config_changes.jsonl",
    "origin.json", "data", "report.html", "mirror.json", "follow", "notes.log", "code_digests.json", "nonfinite",
})  # fmt: skip
"""Names of files and folders that may exist in a run directory without ``config.toml``, because the queue server may
start before the config is written."""
_FILE_PREFIXES = ("metrics.rolled_back", "trained.rolled_back", "metrics.damaged", "trained.damaged", "queue.old-", ".")


def check_run_dir(config: Config, *, fresh: bool, tunable: Sequence[str] | None = None) -> RunDir:
    """Check that ``config`` may use its ``run.dir``, and return the run directory. Write nothing.

    Args:
        fresh: the directory may have a run with any config, because it will be moved aside.
        tunable: the keys that may differ from the run's, in addition to those that are ``Free``. None: those that are
            ``Recorded`` (``config.section.OnResume``).

    Raises:
        RunError: ``run.dir`` is a file, has a run that made steps with other values of other keys, or has other files
            but no run; or ``learner.steps`` is below the steps that the run has trained; or the source of the user's
            own code has changed and ``run.on_code_change`` refuses that.
    """
    run_dir = RunDir(Path(config.run.dir))
    path = run_dir.path
    if not path.exists():
        return run_dir
    if not path.is_dir():
        raise RunError(f"run.dir: expected a directory at {path}, got a file; choose another run.dir")
    if not run_dir.config.exists():
        foreign = sorted(p.name for p in path.iterdir() if not _is_ours(p.name))
        if foreign:
            raise RunError(
                f"run.dir: expected an empty directory or the directory of a run, got {path}, which has no config.toml "
                f"but holds {foreign[0]!r}; choose another run.dir"
            )
    elif not fresh and _has_trained(run_dir):
        _refuse_other_run(run_dir, config, tunable)
        if config.run.on_code_change == "refuse" and not has_ended(run_dir, config):
            _refuse_other_code(run_dir, config)
    return run_dir


def check_place(config: Config, path: Path, overrides: Sequence[str]) -> None:
    """Check that the config file at ``path`` does not lie in another run's directory than ``run.dir``.

    A run directory that was moved or copied still names its old place, and a new run would begin there. ``overrides``
    are the ``--set`` options. If they name ``run.dir``, the place is as the user wants it.

    Raises:
        ConfigError: ``path`` is the config of a run that lies elsewhere than ``run.dir``. The message has both.
    """
    here = path.absolute().parent
    is_chosen = any(override.partition("=")[0].strip() == "run.dir" for override in overrides)
    is_a_run = path.name == RunDir(here).config.name and (here / "run_id").is_file()
    if is_a_run and not is_chosen and here.resolve() != Path(config.run.dir).resolve():
        raise ConfigError(
            f"run.dir: expected {here}, where {path} and its run are, got {config.run.dir}; if the directory was moved "
            f"or copied, go on with --set run.dir={shlex.quote(str(here))}, else name the directory of a new run in "
            f"the same way"
        )


def has_ended(run_dir: RunDir, config: Config) -> bool:
    """Return whether the run in the directory is finished, and ``config`` gives it no further steps or epochs.

    Call ``check_run_dir`` before.
    """
    if not run_dir.is_finished or not run_dir.config.exists():
        return run_dir.is_finished
    old = load_run_config(run_dir.config)
    return config.learner.steps <= old.learner.steps and config.data.epochs == old.data.epochs


def starts_over(run_dir: RunDir, config: Config) -> bool:
    """Return whether the run must be moved aside: its config does not fit, a learner attached, but made no step."""
    return (
        run_dir.config.exists()
        and run_dir.metrics.exists()
        and not _has_trained(run_dir)
        and bool(_misfits(run_dir, config, None))
    )


def prepare_run_dir(config: Config) -> RunDir:
    """Create the directory ``run.dir``, or reuse the run that is there, and write the complete config into it.

    The caller has moved aside a run that can't be reused. The directory may have a finished run, so callers check
    ``has_ended``. A second call changes nothing.

    Raises:
        RunError: the directory can't be written, or ``check_run_dir`` refuses it.
    """
    run_dir = check_run_dir(config, fresh=False)
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        if run_dir.is_finished and not has_ended(run_dir, config):
            os.unlink(run_dir.finished_marker)
        text = config_to_toml(config)
        if not run_dir.config.exists() or run_dir.config.read_text(encoding="utf-8") != text:
            write_atomically(run_dir.config, text)
        if not (run_dir.path / "run_id").exists():
            write_atomically(run_dir.path / "run_id", f"{uuid.uuid4().hex[:12]}\n")
        run_dir.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"run.dir: can't write to {run_dir.path}: {error}; choose another run.dir") from error
    return run_dir


def shared_values(config: Config) -> dict[str, Any]:
    """Return the values of the keys in ``SHARED``, except those that are ``Free``, as plain data."""
    return {
        key: value
        for key, value in plain_values(config).items()
        if is_among(key, SHARED) and on_resume(Config, key) is not OnResume.FREE
    }


def check_shared(config: Config, server: Mapping[str, Any]) -> None:
    """Check that the learner's ``config`` agrees with ``server``, what ``shared_values`` returned in the queue server.

    Raises:
        ConfigError: a value differs, because the server was started with another config.
    """
    own = shared_values(config)
    keys = sorted(own.keys() | server.keys())
    lines = [f"  {show_change(key, server.get(key), own.get(key))}" for key in keys if server.get(key) != own.get(key)]
    if lines:
        listed = "\n".join(lines)
        raise ConfigError(
            f"the queue server runs with another config than this learner; these keys differ (queue server -> "
            f"learner):\n{listed}\nStop the queue server, and start it with the learner's config."
        )


def _is_ours(name: str) -> bool:
    return name in _FILES or name.startswith(_FILE_PREFIXES)


def _has_trained(run_dir: RunDir) -> bool:
    """Return whether the run has made a step. A fork has a checkpoint before its first step, which does not count."""
    if run_dir.trained.exists() and run_dir.trained.stat().st_size > 0:
        return True
    return run_dir.latest_checkpoint is not None and not run_dir.origin.exists()


def _misfits(run_dir: RunDir, config: Config, tunable: Sequence[str] | None) -> list[str]:
    """Return a line ``section.key: old -> new`` for each changed key that the run can't take. Of a config that can't be
    read, return the cause.
    """
    try:
        old = load_run_config(run_dir.config)
    except ConfigError as error:
        return [str(error)]

    def may_change(key: str) -> bool:
        mark = on_resume(Config, key)
        return mark is OnResume.FREE or (mark is OnResume.RECORDED if tunable is None else is_among(key, tunable))

    return [show_change(key, *values) for key, values in changed_keys(old, config).items() if not may_change(key)]


def _refuse_other_run(run_dir: RunDir, config: Config, tunable: Sequence[str] | None) -> None:
    try:
        load_run_config(run_dir.config)
    except ConfigError as error:
        raise RunError(
            f"run.dir: {run_dir.path} holds a run, but this version of async-rl can't read its config.toml; choose "
            f"another run.dir, or start over with --fresh (the old directory is moved aside)\n{error}"
        ) from None
    if changed := _misfits(run_dir, config, tunable):
        listed = "\n".join(f"  {line}" for line in changed)
        raise RunError(
            f"run.dir: {run_dir.path} holds a run with another config; these keys differ (old -> new):\n{listed}\n"
            f"Resume with the old values, continue from a checkpoint of this run in another run.dir with --from "
            f"{run_dir.path}, or start over with --fresh (the old directory is moved aside)."
        )
    trained = max(0, step_of(run_dir.latest_checkpoint))
    if config.learner.steps < trained:
        raise RunError(
            f"learner.steps: expected at least {trained}, the steps that the run in {run_dir.path} has trained, got "
            f"{config.learner.steps}; raise it, or choose another run.dir"
        )


def _refuse_other_code(run_dir: RunDir, config: Config) -> None:
    changed = changed_code(stored_digests(run_dir.path), config.recorded_code_names)
    if changed:
        listed = "\n".join(f"  {show_change(name, *values)}" for name, values in changed.items())
        raise RunError(
            f"run.dir: {run_dir.path} holds a run with other code of your own; these sources differ (SHA-256, old -> "
            f"new):\n{listed}\nPut the old source back, or train on with the new one by --set "
            f"run.on_code_change=accept (the step is recorded), or start over with --fresh (the old directory is moved "
            f"aside)."
        )
