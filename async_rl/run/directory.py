"""The run directory: the paths of its files, and the helpers with which they are written.

``launch`` or ``learner`` creates the directory, whichever starts first. Other modules get the paths from ``RunDir``.
``reuse.py`` says which config may use a directory that has a run.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.errors import RunError


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
    def notes(self) -> Path:
        """Path of ``notes.log``, lines for the user of ``launch``."""
        return self.path / "notes.log"

    @property
    def trained(self) -> Path:
        return self.path / "trained.jsonl"

    @property
    def config_changes(self) -> Path:
        """Path of ``config_changes.jsonl``: which keys changed at a restart, and after which step."""
        return self.path / "config_changes.jsonl"

    @property
    def origin(self) -> Path:
        """Path of ``origin.json``, which says from which checkpoint of another run this run was forked."""
        return self.path / "origin.json"

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
    def scorers(self) -> Path:
        """Path of the folder with a file for each scorer, NAME, that has the digest of its model."""
        return self.path / "scorers"

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

    def read_ledger(self) -> dict[str, Any]:
        """Return the content of ``ledger.json``. It is empty if there is no such file.

        Raises:
            RunError: the file is damaged.
        """
        if not self.ledger.is_file():
            return {}
        content = self.ledger.read_bytes()
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RunError(
                f"expected a JSON object in {self.ledger}, got {content[:40]!r}; the file is damaged, delete it: "
                f"async-rl only shows it"
            )
        return found

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


def move_aside(path: Path) -> Path:
    """Rename the directory ``path`` to ``NAME.old-N``, and return the new path.

    N is the lowest number for which no such file exists.
    """
    path = path.resolve()
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return path.rename(aside)
