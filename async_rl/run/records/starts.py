"""Where a run begins: the steps at which its learner was started, and the run from which it was forked.

The curve marks restarts, and ``comparison`` leaves the start-up out of the seconds that it counts.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from async_rl.errors import RunError
from async_rl.run.directory import RunDir
from async_rl.run.records.step_log import Row, iter_rows

_WARM_UP = 0.1
"""Share of a run's steps, at its beginning, that means over steps leave out."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What ``origin.json`` says: the checkpoint of another run from which this run was forked.

    Attributes:
        run_dir: directory of the other run.
        run_id: id of the other run.
        step: step of the checkpoint. The fork's first step is the next one.
    """

    run_dir: str
    run_id: str
    step: int

    @property
    def label(self) -> str:
        """RUN@STEP, with the name of the run's directory."""
        return f"{Path(self.run_dir).name}@{self.step}"

    @property
    def source(self) -> str:
        """RUN@STEP, with a path of the run's directory, as ``--from`` takes it."""
        return f"{min(self.run_dir, os.path.relpath(self.run_dir), key=len)}@{self.step}"


def read_origin(run_dir: RunDir, remedy: str) -> Origin | None:
    """Return from where a run was forked; None if it was not.

    Args:
        remedy: ends the message of the error: what the user can do.

    Raises:
        RunError: the file is damaged.
    """
    if not run_dir.origin.exists():
        return None
    try:
        return msgspec.json.decode(run_dir.origin.read_bytes(), type=Origin)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"can't read {run_dir.origin}: {type(error).__name__}: {error}; {remedy}") from error


def first_steps(run_dir: RunDir) -> list[int]:
    """Return the first step of each start of the learner, from ``trained.jsonl``. Empty if there is no such file."""
    found: list[int] = []
    lineage = None
    for row in iter_rows(run_dir.trained):
        if "lineage" in row and (not found or row["lineage"] != lineage):
            found.append(row["step"])
            lineage = row["lineage"]
    return found


def warm_steps(steps: Sequence[Row], starts: Collection[int]) -> Sequence[Row]:
    """Return the rows that means over a run are taken over: without the first ones of ``steps``, in which the queue
    fills, and the first one of each start, which waits for the generators. At least the last one remains.

    Args:
        steps: the rows of all steps, in order.
        starts: the first steps of the starts.
    """
    return [row for row in steps[round(_WARM_UP * len(steps)) :] if row["step"] not in starts] or steps[-1:]
