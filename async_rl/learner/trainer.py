"""The learner's loop: take, train, acknowledge, publish. It reads like DESIGN's picture.

Rank 0 runs it; the other ranks follow the engine's commands. Everything it needs arrives through ``__init__``, so that
a benchmark can put a timed engine in place of the real one. ``learner/start.py`` builds the real parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from async_rl.config.config import Config
from async_rl.errors import TrainingError
from async_rl.learner.advantages import with_advantages
from async_rl.learner.batch import (
    PreparedBatch,
    check_staleness,
    prepare_batch,
    sampling_versions,
    staleness_summary,
    trained_facts,
)
from async_rl.learner.bias import DropBias
from async_rl.learner.engine import Engine, UpdateStats
from async_rl.learner.evals import Evaluations
from async_rl.learner.parity import ParityGate
from async_rl.learner.publishing import WeightsPlane
from async_rl.learner.report import step_metrics
from async_rl.learner.rollout_log import log_rollouts
from async_rl.learner.scoring import score, with_scores
from async_rl.learner.staleness_control import BoundLimits, BoundState, read, update_bound
from async_rl.learner.state import TrainerState
from async_rl.learner.step_guard import check_skipped, count_skipped
from async_rl.learner.timing import StepClock
from async_rl.process.fault_points import fault_point
from async_rl.queue.client.learner_client import LearnerQueue
from async_rl.queue.messages import Acked, Announcement, Batch, NotReady, TakenGroup, TrainedFacts
from async_rl.records import Group
from async_rl.run.eval_records import Decode

logger = logging.getLogger(__name__)

TAKE_WAIT_S = 2.0
"""One take waits this long at the queue; between two the other ranks are ticked and the evaluations collected."""
WATCHDOG_S = 30.0


class Recorder(Protocol):
    """Where rows by step go: the metrics, and which groups were trained on."""

    def write(self, row: dict[str, Any]) -> None: ...


class Checkpointer(Protocol):
    """Writes one checkpoint whole or not at all; rollouts and evaluations land beside it."""

    def write(self, state: TrainerState, snapshot: bytes) -> None: ...


class Trainer:
    """One run of the learner, from its (restored) state to the last step, the last checkpoint, the last evaluation."""

    def __init__(
        self,
        config: Config,
        *,
        state: TrainerState,
        engine: Engine,
        queue: LearnerQueue,
        weights: WeightsPlane,
        metrics: Recorder,
        trained: Recorder,
        checkpoints: Checkpointer,
        run_dir: Path,
        decode: Decode,
        parity: ParityGate | None = None,
    ) -> None:
        """``parity`` compares generators' engines with the learner's; none: nothing does."""
        self.config, self.state, self.engine, self.queue = config, state, engine, queue
        self.weights, self.checkpoints = weights, checkpoints
        self.metrics, self.trained, self._parity = metrics, trained, parity
        self._run_dir, self._decode = run_dir, decode
        self._clock = StepClock(state.elapsed_s)
        self._bias = DropBias()
        self._bound_limits = BoundLimits.from_config(config) if config.queue.adaptive else None
        self._published = -1
        self._last_checkpoint = state.step if state.is_resumed else -1
        self._evals = Evaluations(config, state, queue, record=self._record_eval, run_dir=run_dir, decode=decode)

    def run(self) -> None:
        """Train until the last step, or the end of the data. The queue is told of the end by the caller, last.

        Raises:
            TrainingError: the queue says that the run can't go on, or too many optimizer steps in a row were skipped.
            LineageError: a newer learner took over.
        """
        if self.state.is_resumed:
            self._evals.request_pending()
            self._publish()
        else:
            self._evals.request_all()
            self._publish()
            self._await_evals("the evaluation before training")
        self._clock.start_lap()
        while self.state.step < self.config.learner.steps and not self.state.exhausted:
            batch = self._take()
            if batch is None:
                break
            self._train(batch)
        self._finish()

    def _take(self) -> Batch | None:
        """The next batch; None at the end of the data."""
        with self._clock.part("wait"), self._watchdog() as waiting:
            while True:
                answer = self.queue.take(
                    lineage=self.state.lineage, step=self.state.step, version=self.state.version, wait_s=TAKE_WAIT_S
                )
                if isinstance(answer, Batch):
                    fault_point("learner.taken")
                    return answer
                if answer.stop:
                    raise TrainingError(answer.stop)
                if answer.exhausted:
                    logger.info("the data has ended at step %d: %s", self.state.step, answer.reason)
                    self.state.exhausted = True
                    return None
                waiting(answer)
                self.engine.tick()
                self._evals.collect()

    def _train(self, batch: Batch) -> None:
        config, version = self.config, self.state.version
        last_version, bound = version + config.learner.updates_per_batch - 1, config.queue.max_staleness
        with self._clock.part("train"):
            prepared = prepare_batch(
                batch.groups,
                mask_truncated=config.loss.mask_truncated,
                num_updates=config.learner.updates_per_batch,
                known_weights=self._knows_weights,
                oldest_version=last_version - bound if config.queue.on_stale == "mask" else None,
            )
            check_staleness(prepared, version=last_version, max_staleness=bound)
            if self._parity is not None:
                self._parity.check_sampled(batch.groups, prepared, version=version)
            scores = score(prepared, self.engine, config.loss)
            prepared = with_advantages(prepared, config.loss, scores.reference)
            updates = self._update(with_scores(prepared, scores))
        self._record_trained(batch.groups)
        fault_point("learner.trained")
        staleness = staleness_summary(prepared, versions=_versions_trained(version, updates))
        bound_row = self._update_bound(updates, oldest=staleness.max)
        acked, facts = self._acknowledge(prepared, updates)
        fault_point("learner.acknowledged")
        if self._publish_due():
            self._publish(is_last=self._is_last)
        run_updates = [update for update in updates if update is not None]
        row = step_metrics(batch.groups, prepared, run_updates, staleness, facts, acked.stats) | bound_row
        row |= self._clock.lap(acked.stats.generators, roster=acked.stats.roster, trained_tokens=facts.tokens_trained)
        row |= self._bias.step(acked.stats.ledger)
        if self._parity is not None:
            row |= self._parity.observe(self.state.lineage, self.state.version, acked.stats.roster)
        row |= {f"weights/{key}": value for key, value in self.weights.stats().items()}
        self.metrics.write({"step": self.state.step, "version": self.state.version, **row})
        log_rollouts(
            self._run_dir, batch.groups, step=self.state.step, version=version, config=config, decode=self._decode
        )
        self._evals.collect()
        if self.state.step < config.learner.steps:
            self._evals.request_due()
        check_skipped(self.state.skipped_in_a_row, updates[-1], config.loss)
        if acked.snapshot is not None:
            self._checkpoint(acked.snapshot)

    def _update(self, prepared: PreparedBatch) -> list[UpdateStats | None]:
        """One optimizer step on each part of the batch; None for a part in which everything is masked."""
        stats: list[UpdateStats | None] = []
        for sequences in prepared.updates:
            if not sequences:
                logger.warning("step %d: an update has nothing left to train on", self.state.step)
                stats.append(None)
                continue
            update = self.engine.update(sequences, version=self.state.version)
            stats.append(update)
            if update.stepped:
                self.state.version += 1
            else:
                logger.warning("step %d: the optimizer step is skipped: %s", self.state.step, update.reason)
        self.state.skipped_in_a_row = count_skipped(self.state.skipped_in_a_row, stats)
        return stats

    def _update_bound(self, updates: Sequence[UpdateStats | None], *, oldest: int) -> dict[str, float]:
        """Decide on the bound for new leases, which the ack sends; the metrics of it. Nothing unless adaptive."""
        limits = self._bound_limits
        if limits is None:
            return {}
        before = self.state.bound_state or BoundState(limits.highest)
        after = self.state.bound_state = update_bound(before, read(updates, oldest=oldest), limits)
        if after.bound != before.bound:
            step = self.state.step + 1
            logger.info("step %d: the bound for new leases is %d, was %d", step, after.bound, before.bound)
        return {"staleness/bound": after.bound, "staleness/decision": after.bound - before.bound}

    def _acknowledge(
        self, prepared: PreparedBatch, updates: Sequence[UpdateStats | None]
    ) -> tuple[Acked, TrainedFacts]:
        skipped = [i for update in updates if update is not None for i in update.skipped_sequence_ids]
        facts = trained_facts(
            prepared,
            skipped,
            stepped=[u is not None and u.stepped for u in updates],
            out_of_range=sum(u.out_of_range_tokens for u in updates if u is not None and u.stepped),
        )
        done = self.state.step + 1
        every = self.config.checkpoint.every
        snapshot = done == self.config.learner.steps or bool(every and done % every == 0)
        bound_state = self.state.bound_state
        acked = self.queue.ack(
            lineage=self.state.lineage,
            step=self.state.step,
            version=self.state.version,
            facts=facts,
            snapshot=snapshot,
            lease_bound=None if bound_state is None else bound_state.bound,
            # The queue prepares the next batch while this step is published and recorded.
            next_take_s=TAKE_WAIT_S if done < self.config.learner.steps else None,
        )
        self.state.step = done
        return acked, facts

    @property
    def _is_last(self) -> bool:
        return self.state.step == self.config.learner.steps

    def _publish_due(self) -> bool:
        behind = self.state.version - self._published
        return behind >= self.config.weights.sync_every or (behind > 0 and self._is_last)

    def _publish(self, *, is_last: bool = False) -> None:
        with self._clock.part("publish"):
            state, engine = self.state, self.engine
            if self._parity is not None and not is_last:
                self._parity.prepare_probe(state.lineage, state.version)
            published = self.weights.publish(
                state.lineage, state.version, engine.gather(), tick=engine.tick, is_last=is_last
            )
            fault_point("learner.publishing")
            if published is None:
                return
            state.add_digest(published.version, published.digest)
            oldest = state.version - self.config.queue.max_staleness - self.config.learner.updates_per_batch
            state.digests = {v: d for v, d in state.digests.items() if v >= oldest}
            probe = b"" if self._parity is None else self._parity.take_probe(published.version)
            self.queue.announce(Announcement(state.lineage, *published, self.weights.channel, probe))
            self._published = published.version

    def _knows_weights(self, group: Group) -> bool:
        """Whether every version that sampled here came with a digest that this run published for it."""
        digests = self.state.digests
        return all(group.weights_digest.get(v) in digests.get(v, ()) for v in sampling_versions(group))

    def _checkpoint(self, snapshot: bytes) -> None:
        self.state.elapsed_s = self._clock.elapsed_s
        self.checkpoints.write(self.state, snapshot)
        self.queue.checkpoint_committed(self.state.lineage, self.state.step)
        self._last_checkpoint = self.state.step

    def _record_eval(self, step: int, figures: dict[str, Any]) -> None:
        self.metrics.write({"step": step, "time_s": self._clock.elapsed_s, **figures})

    def _await_evals(self, what: str) -> None:
        with self._watchdog() as waiting:
            while self._evals.are_pending:
                self._evals.collect()
                if self._evals.are_pending:
                    waiting(self.queue.await_eval(self.state.lineage, wait_s=TAKE_WAIT_S) or what)
                    self.engine.tick()

    def _record_trained(self, taken: tuple[TakenGroup, ...]) -> None:
        """Which groups this step trained on: the proof that no prompt was skipped or trained twice."""
        groups = [(item.group.position, item.group.lease_id) for item in taken]
        self.trained.write({"step": self.state.step + 1, "lineage": self.state.lineage, "groups": groups})

    def _finish(self) -> None:
        """The last evaluation is wholly the final version; a run that ended early is checkpointed where it ended.

        The checkpoint comes first, as after the last of all steps: what follows it can be done again.
        """
        if self._published < self.state.version:
            self._publish(is_last=True)
        if self._last_checkpoint != self.state.step:
            self._checkpoint(self.queue.snapshot(self.state.lineage))
        self._evals.request_last()
        self._await_evals("the evaluation after training")
        self.state.elapsed_s = self._clock.elapsed_s

    @contextmanager
    def _watchdog(self) -> Iterator[Any]:
        """Gives a function to call after every vain wait; it says every 30 s what is waited for, and since when."""
        started = said = self._clock.elapsed_s

        def waiting(answer: NotReady | str) -> None:
            nonlocal said
            now = self._clock.elapsed_s
            if now - said >= WATCHDOG_S:
                reason = answer if isinstance(answer, str) else answer.reason
                logger.warning("waiting for %.0f s: %s", now - started, reason)
                said = now

        yield waiting


def _versions_trained(version: int, updates: Sequence[UpdateStats | None]) -> list[int]:
    """The learner's version before each update, from ``version`` before the first."""
    versions: list[int] = []
    for update in updates:
        versions.append(version)
        version += update is not None and update.stepped
    return versions
