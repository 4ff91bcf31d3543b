"""``config_changes.jsonl``: which config keys changed when a run was resumed or forked, and after which step.

Every checkpoint has the config with which it was trained. A learner that continues from a checkpoint compares that
config with its own, and records the keys that differ. Each line is ``{"step": 40, "changed": {"queue.max_staleness":
[4, 16]}}``: up to step 40 the value was 4, from then on 16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import changed_keys, is_among
from async_rl.errors import RunError
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.reuse import FREE


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The keys that changed after ``step``: ``section.key`` -> (old value, new value)."""

    step: int
    changed: dict[str, tuple[Any, Any]]


def record_change(run_dir: RunDir, step: int, old: Config, new: Config) -> ConfigChange:
    """Record the difference between ``old``, the config until ``step``, and ``new``. Return it, maybe with no keys.

    Keys in ``FREE`` are left out. Earlier records of ``step`` and of later steps are removed, because the run has gone
    back to ``step``.

    Raises:
        RunError: the file is damaged.
    """
    found = {key: values for key, values in changed_keys(old, new).items() if not is_among(key, FREE)}
    change = ConfigChange(step, found)
    before = read_changes(run_dir)
    kept = [one for one in before if one.step < step]
    if found:
        kept.append(change)
    if kept != before:
        lines = (json.dumps({"step": one.step, "changed": one.changed}) for one in kept)
        write_atomically(run_dir.config_changes, "".join(f"{line}\n" for line in lines))
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
        plain = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [
            ConfigChange(int(one["step"]), {str(key): (old, new) for key, (old, new) in one["changed"].items()})
            for one in plain
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise RunError(
            f"can't read {path}: {type(error).__name__}: {error}; delete the file, and the run goes on without its "
            f"list of changed config keys"
        ) from error
