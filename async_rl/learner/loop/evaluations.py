"""Evaluations during training: requests them from the queue, collects the answers, and records them with the metrics.

Generators sample the answers. The trainer requests evaluations before, during and after training, and collects finished
ones between steps. ``TrainerState.pending_evals`` keeps the evaluations that were requested and not yet recorded, so
that a restarted learner requests them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.loop.recorder import WaitLog
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import EvalResult
from async_rl.rewards.answers import vote_key_of
from async_rl.run.records.eval_records import Decode, eval_metrics, row_records, write_json_lines

logger = logging.getLogger(__name__)

EVAL_WAIT_S = 0.5
"""Longest wait, in seconds, of one request at the queue. Between requests rank 0 notices signals."""
EVAL_LOG_S = 10.0
"""Interval between two log lines about evaluations for which training waits."""


class Evaluations:
    """Requests and records the evaluations of one start of the learner.

    ``record`` is called with the step and the metrics of each finished evaluation.
    """

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
        self._every = {name: config.eval.of(name).every for name in config.data.eval}
        self._vote_key = vote_key_of(config)
        self._state, self._queue = state, queue
        self._record, self._directory, self._decode = record, run_dir / "eval", decode
        self._received: list[tuple[str, int]] = []

    @property
    def are_pending(self) -> bool:
        return bool(self._state.pending_evals)

    def request_all(self) -> None:
        """Request an evaluation of every evaluation set with the current weights. The queue grants no training
        lease until these evaluations are done.
        """
        self._ask(self._every, exclusive=True)

    def request_due(self) -> None:
        """Request the evaluations that are due after the current step. Training continues meanwhile."""
        step = self._state.step
        self._ask([name for name, every in self._every.items() if every and step % every == 0], exclusive=False)

    def request_pending(self) -> None:
        """After a restart, request the unfinished evaluations again, with the current weights."""
        for dataset, step in self._state.pending_evals:
            self._request(dataset, step, exclusive=False)

    def request_last(self) -> None:
        """Request the evaluations after the last step, except those that were requested for this step already."""
        asked = {*self._received, *self._state.pending_evals}
        self._ask([name for name in self._every if (name, self._state.step) not in asked], exclusive=True)

    def collect(self) -> None:
        """Record the evaluations that have finished, and confirm them to the queue, which then forgets them."""
        if not self.are_pending:
            return
        # Ask until no result is returned, because each request confirms the results of the previous request.
        while results := self._queue.eval_results(self._state.lineage, self._received):
            for result in results:
                key = (result.dataset, result.step)
                self._write(result)
                self._received.append(key)
                self._state.pending_evals.remove(key)

    def await_all(self, what: str, *, tick: Callable[[], None]) -> None:
        """Wait until every requested evaluation is recorded.

        ``tick`` is called while waiting. ``what`` is awaited in log messages, if the queue does not say it.
        """
        wait = WaitLog(every_s=EVAL_LOG_S)
        while self.are_pending:
            self.collect()
            if self.are_pending:
                found = self._queue.await_eval(self._state.lineage, wait_s=EVAL_WAIT_S)
                wait.still_waiting(found.reason or what, found.answered, found.rows)
                self.confirm_awaited()
                tick()

    def confirm_awaited(self) -> None:
        """Check that the queue knows the evaluations, and the announced version. Raises QueueError if it does not."""
        self._queue.confirm_awaited(self._state.lineage, self._state.pending_evals)

    def _ask(self, datasets: Iterable[str], *, exclusive: bool) -> None:
        for dataset in datasets:
            self._state.pending_evals.append((dataset, self._state.step))
            self._request(dataset, self._state.step, exclusive=exclusive)

    def _request(self, dataset: str, step: int, *, exclusive: bool) -> None:
        state = self._state
        logger.info("evaluating %s at step %d", dataset, step)
        self._queue.evaluate(
            lineage=state.lineage, dataset=dataset, step=step, min_version=state.version, exclusive=exclusive
        )

    def _write(self, result: EvalResult) -> None:
        prefix = f"eval/{result.dataset}/"
        figures = eval_metrics(result.dataset, result.groups, vote_key=self._vote_key)
        path = self._directory / f"{result.dataset}-step-{result.step:06d}.jsonl"
        lines = (line for p, g in result.groups for line in row_records(p, g, self._decode))
        write_json_lines(path, lines, lambda: self._queue.confirm(self._state.lineage))
        self._record(result.step, figures)
        accuracy = figures.get(f"{prefix}accuracy", float("nan"))
        logger.info("eval %s at step %d: accuracy %.3f", result.dataset, result.step, accuracy)
        if unanswered := figures.get(f"{prefix}unanswered", 0):
            logger.warning(
                "eval %s at step %d: %d of %d rows have no answer (prompts too long, or failed) and count as wrong",
                result.dataset, result.step, unanswered, figures[f"{prefix}rows"],
            )  # fmt: skip
