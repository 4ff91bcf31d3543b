"""How far the mirror of the run is behind (``checkpoint.mirror``), in the row of each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.step_result import StepResult
from async_rl.learner.mirror.manifest import read_status


class MirrorPart(StepPart):
    """Reads ``mirror.json`` of ``run_dir``, which the process that copies writes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def record(self, result: StepResult) -> Mapping[str, float]:
        return {"mirror/behind_steps": read_status(self._run_dir).get("behind_steps") or 0}
