"""Evaluations as the learner sees them: asked of the queue, answered by generators, recorded beside the metrics.

The trainer asks before, between and after training; answers come whenever they are done. What was asked and is not yet
written survives a restart in ``TrainerState.pending_evals``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.eval_records import Decode, answer_record, eval_metrics, write_json_lines
from async_rl.learner.state import TrainerState
from async_rl.queue.client import LearnerQueue
from async_rl.queue.messages import EvalResult

logger = logging.getLogger(__name__)


class Evaluations:
    """The evaluations of one learner start. ``record`` takes the row of each, at its step."""

    def __init__(
        self,
        config: Config,
        state: TrainerState,
        queue: LearnerQueue,
        *,
        record: Callable[[int, dict[str, Any]], None],
        run_dir: Path,
        decode: Decode,
    ) -> None:
        self._datasets, self._state, self._queue = tuple(config.data.eval), state, queue
        self._record, self._directory, self._decode = record, run_dir / "eval", decode
        self._received: list[tuple[str, int]] = []

    @property
    def are_pending(self) -> bool:
        return bool(self._state.pending_evals)

    def request(self, *, exclusive: bool) -> None:
        """Ask for every dataset, of the weights that there are now; ``exclusive``: no training lease before the end."""
        for dataset in self._datasets:
            self._state.pending_evals.append((dataset, self._state.step))
            self._request(dataset, self._state.step, exclusive=exclusive)

    def request_pending(self) -> None:
        """After a restart: answers that were not written are asked for again, of the weights that there are now."""
        for dataset, step in self._state.pending_evals:
            self._request(dataset, step, exclusive=False)

    def request_last(self) -> None:
        """Ask for the evaluation after training, unless one of this step was asked for already."""
        final = {(dataset, self._state.step) for dataset in self._datasets}
        if not final <= {*self._received, *self._state.pending_evals}:
            self.request(exclusive=True)

    def collect(self) -> None:
        """Record what is finished, and let the queue know that it may forget it."""
        if not self.are_pending:
            return
        # Until nothing comes: only then does the queue know of the last one that it was received.
        while results := self._queue.eval_results(self._state.lineage, self._received):
            for result in results:
                key = (result.dataset, result.step)
                self._write(result)
                self._received.append(key)
                self._state.pending_evals.remove(key)

    def _request(self, dataset: str, step: int, *, exclusive: bool) -> None:
        state = self._state
        self._queue.evaluate(
            lineage=state.lineage, dataset=dataset, step=step, min_version=state.version, exclusive=exclusive
        )

    def _write(self, result: EvalResult) -> None:
        figures = eval_metrics(result.dataset, result.groups)
        path = self._directory / f"{result.dataset}-step-{result.step:06d}.jsonl"
        write_json_lines(path, (answer_record(p, r, self._decode) for p, g in result.groups for r in g.rollouts))
        self._record(result.step, figures)
        accuracy = figures.get(f"eval/{result.dataset}/accuracy", float("nan"))
        logger.info("eval %s at step %d: accuracy %.3f", result.dataset, result.step, accuracy)
