"""The run directory: the paths of its files, whether its run is finished, and whether a config may use it.

``launch`` or ``learner`` creates the directory, whichever starts first. Other modules get the paths from ``RunDir``. If
the directory has a run with the same config, that run is resumed. If it has a run with another config, an error lists
the keys that differ. ``--fresh`` renames the old directory and starts a new run.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import config_difference, config_to_toml, load_config
from async_rl.errors import ConfigError, RunError

MAY_DIFFER: tuple[str, ...] = (
    "run.dir", "run.name", "data.on_change",
    "queue.address", "queue.advertise", "queue.keys", "queue.max_bytes", "queue.lease_timeout_s", "queue.journal_dir",
    "learner.max_tokens", "learner.nproc", "learner.devices", "learner.reshard", "learner.num_threads",
    "generator.count", "generator.devices", "generator.tensor_parallel_size", "generator.batch_size",
    "generator.max_concurrent_groups", "generator.memory_fraction", "generator.num_threads",
    "weights.transport", "weights.deadline_s", "weights.staging_bytes",
    "weights.trusted_network", "weights.deltas", "weights.parity",
    "checkpoint.every", "checkpoint.keep_last",
    "log.wandb", "log.project", "log.rollouts_every", "log.rollouts_groups",
    "experimental.max_messages_per_s", "experimental.max_malformed_per_minute", "experimental.distributed_timeout_s",
    "experimental.bucket_bytes", "experimental.parity_every", "experimental.parity_limit", "experimental.linger_s",
    "experimental.sft_checkpoint_every", "sft",
)  # fmt: skip
"""Keys (and one section) of the config that may change when a run is resumed. They change where and how fast the run
computes and what it records, but not what it learns."""

_ENTRIES = frozenset({
    "config.toml", "queue.json", "queue", "metrics.jsonl", "trained.jsonl", "ledger.json", "rollouts", "eval",
    "checkpoints", "export", "curve.png", "logs", "finished.json", "run.lock", "wandb", "wandb_id", "run_id", "sft",
})  # fmt: skip
"""Names of files and folders that may exist in a run directory without ``config.toml``, because the queue server may
start before the config is written."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of a run's files. The constructor does not access the disk."""

    path: Path

    @property
    def config(self) -> Path:
        """Path of ``config.toml``, a copy of the run's config with all defaults and ``--set`` options filled in."""
        return self.path / "config.toml"

    @property
    def run_id(self) -> str:
        """The run's id, read from the file ``run_id``. No other run has the same id.

        The id is generated when the directory is created, and stays the same when the run is resumed.
        """
        return (self.path / "run_id").read_text(encoding="utf-8").strip()

    @property
    def queue(self) -> Path:
        """Path of ``queue.json``, which has the queue server's run id, process id and address."""
        return self.path / "queue.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trained(self) -> Path:
        return self.path / "trained.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def latest_checkpoint(self) -> str | None:
        """The name of the newest checkpoint, as ``checkpoints/latest`` gives it; None if that file does not exist."""
        latest = self.checkpoints / "latest"
        return latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else None

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def finished_marker(self) -> Path:
        return self.path / "finished.json"

    @property
    def lock(self) -> Path:
        """Path of ``run.lock``. The ``launch`` or ``learner`` that uses the run directory has locked this file."""
        return self.path / "run.lock"

    @property
    def is_finished(self) -> bool:
        """Whether the run has trained its last step and written all its files."""
        return self.finished_marker.exists()

    def mark_finished(self, facts: Mapping[str, Any]) -> None:
        """Write ``finished.json``, which marks the run as finished.

        ``facts`` is its content, such as steps and seconds.
        """
        write_atomically(self.finished_marker, json.dumps(dict(facts), indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``. Readers see the whole old file or the whole new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def check_writable(path: Path, key: str) -> None:
    """Check that files can be written in the directory ``path``. If it does not exist, check its nearest parent.

    The check creates a temporary directory and removes it.

    Raises:
        RunError: files can't be written there. The message names ``key``, the config key whose value is ``path``.
    """
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise RunError(f"{key}: expected a directory at {path}, but {place} is a file; choose another {key}")
    try:
        with tempfile.TemporaryDirectory(prefix=".async-rl-probe-", dir=place):
            pass
    except OSError as error:
        raise RunError(
            f"{key}: can't write to {path}: {error.strerror or error} in {place}; choose another {key}"
        ) from None


def check_run_dir(config: Config, *, fresh: bool) -> RunDir:
    """Check that ``config`` may use its ``run.dir``, and return the run directory. Write nothing.

    With ``fresh`` the directory may have a run with another config, because that run will be moved aside.

    Raises:
        RunError: ``run.dir`` is a file, has a run with another config, or has other files but no run.
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
    elif not fresh:
        _refuse_changed_config(run_dir, config)
    return run_dir


def prepare_run_dir(config: Config, *, fresh: bool = False) -> RunDir:
    """Create the directory ``run.dir``, or reuse it to resume its run, and write the complete config into it.

    With ``fresh``, the directory of an existing run is first renamed to ``NAME.old-N``. Without ``fresh``, the
    directory may have a finished run, so callers check ``is_finished``, and a second call changes nothing.

    Raises:
        RunError: the directory can't be written, has other files but no run, or has a run with another config. In the
            last case the message lists the keys that differ and are not in ``MAY_DIFFER``.
    """
    run_dir = check_run_dir(config, fresh=fresh)
    try:
        if fresh and run_dir.config.exists():
            move_aside(run_dir.path)
        run_dir.path.mkdir(parents=True, exist_ok=True)
        text = config_to_toml(config)
        if not run_dir.config.exists() or run_dir.config.read_text(encoding="utf-8") != text:
            write_atomically(run_dir.config, text)
        if not (run_dir.path / "run_id").exists():
            write_atomically(run_dir.path / "run_id", f"{uuid.uuid4().hex[:12]}\n")
        run_dir.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"run.dir: can't write to {run_dir.path}: {error}; choose another run.dir") from error
    return run_dir


def _is_ours(name: str) -> bool:
    return name in _ENTRIES or name.startswith(("metrics.rolled_back", "trained.rolled_back", "."))


def _refuse_changed_config(run_dir: RunDir, config: Config) -> None:
    try:
        old = load_config(run_dir.config)
    except ConfigError as error:
        raise RunError(
            f"run.dir: {run_dir.path} holds a run, but this version of async-rl can't read its config.toml; choose "
            f"another run.dir, or start over with --fresh (the old directory is moved aside)\n{error}"
        ) from None
    changed = [line for line in config_difference(old, config) if not _may_differ(line.partition(":")[0])]
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise RunError(
            f"run.dir: {run_dir.path} holds a run with another config; these keys differ (old -> new):\n{listed}\n"
            f"Resume with the old values, choose another run.dir, or start over with --fresh (the old directory is "
            f"moved aside)."
        )


def _may_differ(key: str) -> bool:
    return key in MAY_DIFFER or key.partition(".")[0] in MAY_DIFFER


def move_aside(path: Path) -> None:
    """Rename the directory ``path`` to ``NAME.old-N``. N is the lowest number for which no such file exists."""
    path = path.resolve()
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(aside)
