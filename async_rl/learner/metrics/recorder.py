"""Write down each step: the groups it trained on, its row of ``metrics.jsonl``, its rollouts as text.

The trainer calls ``record_trained`` before it acknowledges a step and ``record_step`` after it published the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from async_rl.config.config import Config
from async_rl.learner.metrics.bias import DropBias
from async_rl.learner.metrics.rollout_log import log_rollouts
from async_rl.learner.metrics.step_metrics import step_metrics
from async_rl.learner.metrics.timing import StepClock
from async_rl.learner.parity import ParityGate
from async_rl.learner.publishing import WeightsPlane
from async_rl.learner.state import TrainerState
from async_rl.learner.step_result import StepResult
from async_rl.queue.messages import Acked, TakenGroup
from async_rl.run.eval_records import Decode


class RowWriter(Protocol):
    """A file of rows by step: the metrics, or the step log."""

    def write(self, row: dict[str, Any]) -> None: ...


class StepRecorder:
    """The records of one learner start. It owns the clock."""

    def __init__(
        self,
        config: Config,
        state: TrainerState,
        *,
        metrics: RowWriter,
        step_log: RowWriter,
        weights: WeightsPlane,
        parity: ParityGate | None,
        run_dir: Path,
        decode: Decode,
    ) -> None:
        """``metrics`` takes the rows of ``metrics.jsonl``, ``step_log`` the groups that each step trained on."""
        self.clock = StepClock(state.elapsed_s)
        self._config, self._state, self._run_dir, self._decode = config, state, run_dir, decode
        self._metrics, self._step_log = metrics, step_log
        self._weights, self._parity = weights, parity
        self._bias = DropBias()

    def record_trained(self, taken: tuple[TakenGroup, ...]) -> None:
        """Log which groups the step trained on. The log proves that no prompt was skipped or trained twice."""
        groups = [(item.group.position, item.group.lease_id) for item in taken]
        self._step_log.write({"step": self._state.step + 1, "lineage": self._state.lineage, "groups": groups})

    def record_step(self, result: StepResult, acked: Acked, bound_metrics: Mapping[str, float]) -> None:
        """Write the metrics of the step that was just acknowledged and published, and its rollouts if they are due.

        Raises:
            ParityError: a generator's answer shows that its engine differs from the learner's.
        """
        state, stats = self._state, acked.stats
        row = {**step_metrics(result, stats), **bound_metrics}
        row |= self.clock.lap(stats.generators, roster=stats.roster, trained_tokens=result.facts.tokens_trained)
        row |= self._bias.step(stats.ledger)
        if self._parity is not None:
            row |= self._parity.observe(state.lineage, state.version, stats.roster)
        row |= {f"weights/{key}": value for key, value in self._weights.stats().items()}
        self._metrics.write({"step": state.step, "version": state.version, **row})
        log_rollouts(
            self._run_dir,
            result.groups,
            step=state.step,
            version=result.version,
            config=self._config,
            decode=self._decode,
        )

    def record_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the row of an evaluation of ``step``."""
        self._metrics.write({"step": step, "time_s": self.clock.elapsed_s, **figures})
