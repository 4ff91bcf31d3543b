"""``config_changes.jsonl``: which config keys and which of the user's own code changed when a run was resumed or
forked, and after which step.

Every checkpoint has the config with which it was trained, and the digests of the user's code. A learner that continues
from a checkpoint compares them with its own, and records what differs. Each line is ``{"step": 40, "changed":
{"queue.max_staleness": [4, 16]}}``: up to step 40 the value was 4, from then on 16. The key of changed code is its
name, such as ``my_reward.py:score``, and its values are digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from async_rl.config.config import Config
from async_rl.config.loading import changed_keys, show_change
from async_rl.config.section import OnResume, on_resume
from async_rl.errors import RunError
from async_rl.run.directory import RunDir, write_atomically


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """What changed after ``step``: ``section.key`` or the name of user code -> (old value, new value)."""

    step: int
    changed: dict[str, tuple[Any, Any]]

    @property
    def lines(self) -> list[str]:
        """A line of text for each change."""
        return [f"from step {self.step + 1} on: {show_change(key, *values)}" for key, values in self.changed.items()]


def record_change(
    run_dir: RunDir, step: int, old: Config, new: Config, code: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> ConfigChange:
    """Record the difference between ``old``, the config until ``step``, and ``new``. Return it, maybe with no keys.

    ``code`` is what ``process.user_code.changed_code`` found. Keys that are ``Free`` are left out. Earlier records of
    ``step`` and of later steps are removed, because the run has gone back to ``step``.

    Raises:
        RunError: the file is damaged.
    """
    changed = changed_keys(old, new).items()
    found = {key: values for key, values in changed if on_resume(Config, key) is not OnResume.FREE}
    found |= code
    change = ConfigChange(step, found)
    before = read_changes(run_dir)
    kept = [one for one in before if one.step < step]
    if found:
        kept.append(change)
    if kept != before:
        write_atomically(run_dir.config_changes, "".join(f"{msgspec.json.encode(one).decode()}\n" for one in kept))
    return change


def read_changes(run_dir: RunDir) -> list[ConfigChange]:
    """Return the recorded changes of a run, in the order of their steps.

    Raises:
        RunError: the file is damaged.
    """
    path = run_dir.config_changes
    if not path.exists():
        return []
    try:
        return [msgspec.json.decode(line, type=ConfigChange) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"can't read {path}: {type(error).__name__}: {error}; delete the file, and the run goes on without its "
            f"list of changed config keys"
        ) from error
