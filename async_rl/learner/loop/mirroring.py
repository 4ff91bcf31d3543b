"""How far the mirror of the run is behind (``checkpoint.mirror``), in the row of each step."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.learner.checkpoints.mirror import behind_steps, read_status
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.step_result import StepResult
from async_rl.run.directory import RunDir


class MirrorPart(StepPart):
    """Compares the run's newest checkpoint with ``mirror.json``, which the process that copies writes."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def record(self, result: StepResult) -> Mapping[str, float]:
        return {"mirror/behind_steps": behind_steps(self._run_dir, read_status(self._run_dir.path))}
