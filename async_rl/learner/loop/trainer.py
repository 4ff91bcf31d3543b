"""The learner's loop on rank 0. One step is::

    take G groups        _take          the queue sends a batch, or the reason why it has none yet. The last batch of
                                        data that has ended may be smaller
    advantages           _prepare       groups -> sequences with masks, scores, advantages
    judge, pack, train   _update        rules over a whole step (step_masks.py); engine: pack, log-probs, loss, clip,
                                        optimizer step; then version + 1
    acknowledge          _acknowledge   send the queue the counts of the step and the new version; then trained.jsonl
    publish              _publish       the new weights go to the generators
    record               StepRecorder
    checkpoint           _checkpoint copies the state, which is then written in the background; _commit, at the end of a
                         later step or while the learner waits

What a run may have beside this (a critic, parity checks, sampling while the learner waits) is a
list of parts, which are called at the same places of every step (``parts.py``).

At most one checkpoint is being written. The next one waits for it before its step is acknowledged, because the queue
keeps what a checkpoint needs until a newer one is committed. A stop and the end of the run wait for it, too.

A signal that asks the learner to stop is noticed while it waits, before it trains a batch, and after a step. Then it
saves the last trained step and ends. Groups that it has taken but not trained are queued in the checkpoint.

The other ranks follow the engine's commands. All dependencies arrive through ``__init__``, so a benchmark or test can
replace any of them. ``start.py`` builds the real ones. ``examples/heart.py`` has the same steps in twenty lines.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.errors import CollapseError, LineageError, RunStoppedError, StoppedError
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.checkpoints.writer import CheckpointWriter
from async_rl.learner.data.batch import PreparedBatch, prepare_batch, with_scores
from async_rl.learner.interface import Engine, PolicyScores, UpdateStats
from async_rl.learner.loop.evaluations import Evaluations
from async_rl.learner.loop.nonfinite import record_nonfinite
from async_rl.learner.loop.parity import ParityGate
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.profiling import StepProfiler
from async_rl.learner.loop.publishing import VersionPublisher, WeightsSender
from async_rl.learner.loop.recorder import RowWriter, StepRecorder, WaitLog
from async_rl.learner.loop.staleness import check_staleness
from async_rl.learner.loop.step_result import StepResult, check_skipped, count_skipped, step_result, trained_metrics
from async_rl.learner.losses.advantages import with_advantages
from async_rl.learner.losses.own_advantage import load_own_advantage
from async_rl.learner.losses.step_masks import judge_step
from async_rl.learner.sequences import TrainSequence
from async_rl.output import logged
from async_rl.process.fault_points import fault_point
from async_rl.process.user_code import stored_digests
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import Acked, Batch, StepAck
from async_rl.routes import RoutingShape
from async_rl.run.directory import RunDir, checkpoint_name
from async_rl.run.figures.health import Health, Note
from async_rl.run.records.eval_records import Decode
from async_rl.run.records.step_log import Row, iter_rows

logger = logging.getLogger(__name__)

TAKE_WAIT_S = 0.5
"""Longest wait of one take, in seconds. Between takes the trainer notices signals and collects evaluations."""


class _Asked(Exception):  # noqa: N818 - not an error: it leaves the loop
    """A signal asks the learner to stop, at a point where it can save its last step."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class _Collapsed(Exception):  # noqa: N818 - the error is raised once the step is saved
    """A step shows a collapse, and ``run.stop_on_collapse`` is set."""

    def __init__(self, note: Note) -> None:
        super().__init__(note.cause)
        self.note = note


class Trainer:
    """The training loop of one learner start, on rank 0. It ends after the last step, checkpoint and evaluation."""

    def __init__(
        self,
        config: Config,
        *,
        state: TrainerState,
        engine: Engine,
        queue: LearnerQueue,
        weights: WeightsSender,
        metrics: RowWriter,
        step_log: RowWriter,
        run_dir: Path,
        decode: Decode,
        parts: Sequence[StepPart] = (),
        probes: ParityGate | None = None,
        stop_signal: Callable[[], int] = lambda: 0,
        vocab_size: int | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        """``parts`` are what this run has beside the algorithm. ``probes`` are announced with versions, so that
        generators are compared with the learner; None: none are. ``stop_signal`` returns the signal that asks this
        learner to stop, 0 if there is none. ``vocab_size`` limits token ids. None: no limit. ``routing`` is the shape
        of the routes to replay. None: the model's routers choose.
        """
        self._parts, self._stop_signal = parts, stop_signal
        self.config, self.state, self.engine, self.queue = config, state, engine, queue
        self._run_dir, self._vocab_size, self._decode = run_dir, vocab_size, decode
        self._own_advantage, self._routing = load_own_advantage(config), routing
        self._recorder = StepRecorder(
            config, state,
            metrics=metrics, step_log=step_log, weights=weights, run_dir=run_dir, decode=decode, confirm=self._confirm,
        )  # fmt: skip
        self._clock = self._recorder.clock
        self._profiler = StepProfiler(config.log.profiled_steps, run_dir / "profile")
        self._publisher = VersionPublisher(config, state, engine, queue, weights, probes)
        self._evaluations = Evaluations(
            config, state, queue, record=self._record_evaluation, run_dir=run_dir, decode=decode
        )
        self._writer = CheckpointWriter(
            engine, run_dir, config.checkpoint, lineage=state.lineage, confirm=self._confirm
        )
        self._saved_metrics: dict[str, float] = {}
        self._health, self._first_step = Health(iter_rows(RunDir(run_dir).metrics)), state.step
        self._why_ended = ""
        self._has_logged_batch = False
        self._last_checkpoint = state.step if state.is_resumed else -1

    def run(self) -> None:
        """Train until the last step or the end of the data. The caller notifies the queue of the end afterwards.

        Raises:
            RunStoppedError: the queue stopped the run, or it ended and has trained nothing.
            TrainingError: too many optimizer steps in a row were skipped.
            LineageError: a newer learner took over.
            StoppedError: a signal asked to stop. The last trained step is saved.
            CollapseError: the training has collapsed (``run.stop_on_collapse``). The last trained step is saved.
            RunError: a checkpoint could not be written.
        """
        try:
            self._begin()
            while self.state.step < self.config.learner.steps and not self.state.exhausted:
                with self._profiler.step(self.state.step + 1):
                    batch = self._take()
                    if batch is not None:
                        self._train(batch)
                if batch is None:
                    break
                self._check_stop()
                self._check_collapse()
            self._check_trained()
            self._finish()
        except _Asked as asked:
            raise StoppedError(f"stopped by {signal.Signals(asked.signum).name}: {self._save_for_stop()}") from None
        except _Collapsed as collapsed:
            note = collapsed.note
            raise CollapseError(
                f"run.stop_on_collapse: {note.finding} at step {note.step} ({self._save_for_stop()}). {note.remedy}"
            ) from None
        except LineageError:
            raise
        except Exception:
            self._commit_despite_error()
            raise
        finally:
            self._writer.close()

    def _check_trained(self) -> None:
        """Stop a run that ends with the weights that it began with. It must not look like a success."""
        state = self.state
        if state.version > state.first_version or any(part.has_trained for part in self._parts):
            if self._why_ended:
                logger.info("step %d was the last one: %s", state.step, self._why_ended)
            return
        skipped = ""
        if state.step:
            skipped = (
                f"no step of {state.step} has changed the weights: their optimizer steps were skipped, or all their "
                f"answers were left out of the loss (masked/* and skip/* in metrics.jsonl, and the learner's log say "
                f"why). Correct the config, and pass --fresh to start over. "
            )
        raise RunStoppedError(f"this run has trained nothing: {skipped}{self._why_ended}".rstrip())

    def _check_stop(self) -> None:
        if signum := self._stop_signal():
            raise _Asked(signum)

    def _check_collapse(self) -> None:
        """End the loop after a collapse if ``run.stop_on_collapse`` is set and there are further steps."""
        if self.config.run.stop_on_collapse and not self._is_last_step:
            note = self._health.collapse_after(self._first_step)
            if note is not None:
                raise _Collapsed(note)

    def _tick(self) -> None:
        """Keep the other ranks alive during a wait, and commit a checkpoint whose files are written. Raise if a signal
        asks the learner to stop.
        """
        self.engine.tick()
        self._commit()
        self._check_stop()

    def _save_for_stop(self) -> str:
        """Save the last trained step unless a checkpoint has it. Return a text that says where a restart begins."""
        step = self.state.step
        if self._last_checkpoint != step:
            if not step:
                return "no step is trained yet, so the same command starts over"
            self._checkpoint()
        self._commit(wait=True)
        return f"saved at step {step}; the same command resumes from {checkpoint_name(step)}"

    def _train(self, batch: Batch) -> None:
        """Make one step on the batch: advantages, training, acknowledgement, publication, records and checkpoint."""
        version = self.state.version
        with self._clock.part("train"):
            with self._clock.part("prepare"):
                prepared = self._prepare(batch)
            self._log_first(prepared)
            self._check_stop()  # after the first update the step must be finished
            for part in self._parts:
                with self._timed(part):
                    prepared = part.train(prepared, version=version)
            updates = [] if any(part.freezes_policy for part in self._parts) else self._update(prepared)
        has_own_loss = self.config.loss.function is not None
        result = step_result(batch.groups, prepared, updates, version=version, has_own_loss=has_own_loss)
        fault_point("learner.trained")  # the optimizer has stepped, the queue does not know
        figures = dict(trained_metrics(result))
        for part in self._parts:
            figures |= part.trained(result)
        self._judge({"step": self.state.step + 1, "version": self.state.version, **figures})
        acked = self._acknowledge(result)
        self.state.step += 1
        for part in self._parts:
            part.acknowledged(acked)
        self._recorder.record_trained(batch.groups)
        # The queue has recorded the step (and the snapshot), the checkpoint is not begun.
        fault_point("learner.acknowledged")
        if self._publisher.is_due(is_last=self._is_last_step):
            # A signal stays set, so ``run`` raises it again once this step is recorded. A restart publishes this.
            with suppress(_Asked):
                self._check_stop()
                self._publish(is_last=self._is_last_step)
        for part in self._parts:
            figures |= part.record(result)
        others = [update for part in self._parts for update in part.updates]
        self._recorder.record_step(result, acked, figures | self._saved_metrics, others)
        self._saved_metrics = {}
        self._evaluations.collect()
        if not self._is_last_step:
            self._evaluations.request_due()
        if updates:
            check_skipped(self.state.skipped_in_a_row, updates[-1], self.config.experimental.max_skipped_steps)
        for part in self._parts:
            part.end()
        self._commit()
        if acked.snapshot is not None:
            self._checkpoint(acked.snapshot)

    def _log_first(self, prepared: PreparedBatch) -> None:
        """Log what the first step of this start trains on. ``launch`` shows it, because a long step shows nothing."""
        if self._has_logged_batch:
            return
        self._has_logged_batch = True
        sequences = prepared.sequences
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        step, num_groups = self.state.step + 1, len(prepared.group_sizes)
        logger.info(
            "training step %d: %d groups, %d sequences, %d tokens", step, num_groups, len(sequences), num_tokens
        )

    def _take(self) -> Batch | None:
        """Return the next batch. None at the end of the data."""
        wait = WaitLog()
        with self._clock.part("wait"), ExitStack() as waiting:
            is_waiting = False
            while True:
                if not is_waiting and not self.queue.is_take_answered:
                    # Not for a batch that is there: leases that are granted for a moment would only be held up.
                    waiting.enter_context(self._waiting())
                    is_waiting = True
                answer = self.queue.take(
                    lineage=self.state.lineage, step=self.state.step, version=self.state.version, wait_s=TAKE_WAIT_S
                )
                if isinstance(answer, Batch):
                    fault_point("learner.taken")  # the batch has arrived, it is not trained
                    return answer
                if answer.stop:
                    raise RunStoppedError(answer.stop)
                if answer.exhausted:
                    self.state.exhausted, self._why_ended = True, answer.reason
                    return None
                wait.still_waiting(answer.reason)
                self._evaluations.confirm_awaited()
                self._tick()
                self._evaluations.collect()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let the parts use the wait that the ``with`` block is."""
        newest = self._publisher.newest
        assert newest is not None, "a version is published before the first wait"
        with ExitStack() as used:
            for part in self._parts:
                used.enter_context(part.while_waiting(newest))
            yield

    def _timed(self, part: StepPart) -> AbstractContextManager[None]:
        return self._clock.part(part.timed_as) if part.timed_as else nullcontext()

    def _await_evaluations(self, what: str) -> None:
        with self._waiting():
            self._evaluations.await_all(what, tick=self._tick)

    def _prepare(self, batch: Batch) -> PreparedBatch:
        """Return the batch's sequences with masks, advantages, and the log-probabilities that the loss needs.

        Raises:
            StaleRolloutError: a token is above the staleness bound.
            ParityError: a generator's engine differs from the learner's.
            OwnCodeError: the user's function for advantages fails.
        """
        config, version = self.config, self.state.version
        last_version = version + config.learner.versions_per_batch - 1
        max_staleness = config.queue.max_staleness
        prepared = prepare_batch(
            batch.groups,
            mask_truncated=config.loss.mask_truncated,
            num_updates=config.learner.num_updates(len(batch.groups)),
            known_weights=self._publisher.knows_weights,
            oldest_version=last_version - max_staleness if config.queue.on_stale == "mask" else None,
            vocab_size=self._vocab_size,
            max_tokens=config.longest_sequence,
            routing=self._routing,
            distill=config.distill if config.distill.is_set else None,
        )
        check_staleness(prepared, version=last_version, max_staleness=max_staleness)
        for part in self._parts:
            prepared = part.check(batch, prepared, version=version)
        scored = with_scores(
            prepared, self.engine, config.loss,
            num_epochs=config.learner.epochs_per_batch, needs_policy=config.critic.importance_cap > 0,
        )  # fmt: skip
        for part in self._parts:
            with self._timed(part):
                scored = part.score(scored)
        return with_advantages(
            scored, config.loss,
            own=self._own_advantage, version=version, critic=config.critic, reward=config.reward,
        )  # fmt: skip

    def _update(self, prepared: PreparedBatch) -> list[UpdateStats | None]:
        """Make an optimizer step on each mini-batch, in every epoch. The result is None for a mini-batch in which all
        tokens are masked.
        """
        step, scored_version = self.state.step + 1, self.state.version
        stats: list[UpdateStats | None] = []
        for sequences in prepared.mini_batches * self.config.learner.epochs_per_batch:
            if not sequences:
                logger.warning(
                    "step %d: every token of a mini-batch is masked, so it makes no optimizer step; masked/* in "
                    "metrics.jsonl has the causes",
                    step,
                )
                stats.append(None)
                continue
            scores = prepared.policy_scores if self.state.version == scored_version else {}
            update = self._update_once(sequences, scores)
            stats.append(update)
            if update.stepped:
                self.state.version += 1
            else:
                logger.warning("step %d: the optimizer step is skipped: %s", step, update.reason)
                if not math.isfinite(update.grad_norm):
                    self._record_nonfinite(sequences, update, prepared)
        self.state.skipped_in_a_row = count_skipped(self.state.skipped_in_a_row, stats)
        return stats

    def _update_once(self, sequences: Sequence[TrainSequence], scores: Mapping[int, PolicyScores]) -> UpdateStats:
        """Make one optimizer step, after the rules of ``[loss]`` that judge all its tokens together.

        ``scores`` are those of the current weights. If they are empty and needed, the sequences are scored first.
        """
        version = self.state.version
        if not self.config.loss.judges_step:
            return self.engine.update(sequences, version=version)
        judged = judge_step(sequences, scores or self.engine.score_policy(sequences), self.config.loss)
        update = self.engine.update(judged.sequences, version=version)
        return replace(update, rule_tokens={**update.rule_tokens, **judged.counts})

    def _record_nonfinite(
        self, sequences: Sequence[TrainSequence], update: UpdateStats, prepared: PreparedBatch
    ) -> None:
        path = record_nonfinite(
            self._run_dir, sequences, update, prepared,
            step=self.state.step + 1, version=self.state.version, decode=self._decode, confirm=self._confirm,
        )  # fmt: skip
        if path is not None:
            logger.warning("what it trained on is in %s, a line for each sequence", path)

    def _acknowledge(self, result: StepResult) -> Acked:
        """Send the queue what was trained and the new version. Ask for the queue's snapshot if a checkpoint is due."""
        done, steps = self.state.step + 1, self.config.learner.steps
        every = self.config.checkpoint.every
        needs_snapshot = done == steps or bool(every and done % every == 0)
        if needs_snapshot:
            self._commit(wait=True)
        ack = StepAck(
            lineage=self.state.lineage,
            step=self.state.step,
            version=self.state.version,
            trained=result.facts,
            snapshot=needs_snapshot,
            training_notes=tuple(note.text for note in self._health.notes),
        )
        # The queue prepares the next batch while this step is published and recorded.
        return self.queue.ack(ack, next_take_s=TAKE_WAIT_S if done < steps else None)

    def _record_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        self._recorder.record_evaluation(step, figures)
        self._judge({"step": step, **figures})

    def _judge(self, row: Row) -> None:
        """Log what is wrong with the training by the row of a step or of an evaluation."""
        for note in self._health.add(row):
            logger.warning("note: %s", note.text)

    @property
    def _is_last_step(self) -> bool:
        return self.state.step == self.config.learner.steps

    def _publish(self, *, is_last: bool = False) -> None:
        with self._clock.part("publish"):
            self._publisher.publish(tick=self._tick, is_last=is_last)

    def _checkpoint(self, snapshot: bytes | None = None) -> None:
        """Begin the checkpoint of this step. ``snapshot`` is the queue's after this step; None: request it."""
        if snapshot is None:
            self._commit(wait=True)
            snapshot = self.queue.snapshot(self.state.lineage)
        with self._clock.part("checkpoint"):
            self.state.elapsed_s = self._clock.elapsed_s
            extra = {
                "trainer": self.state.to_plain(), "queue": snapshot, "config": config_to_toml(self.config),
                "code_digests": stored_digests(self._run_dir),
            }  # fmt: skip
            with logged(logger, f"saving the checkpoint of step {self.state.step}"):
                self._writer.begin(self.state.step, extra)
            self._last_checkpoint = self.state.step
        if not self.config.checkpoint.asynchronous:
            self._commit()

    def _commit(self, *, wait: bool = False) -> None:
        """Commit the checkpoint that is being written, if its files are written. With ``wait``, wait for them."""
        with self._clock.part("checkpoint"):
            log = WaitLog()
            while wait and not self._writer.is_written(TAKE_WAIT_S):
                log.still_waiting(f"the files of the checkpoint of step {self._writer.step}")
                self.engine.tick()
            committed = self._writer.poll()
        if committed is not None:
            self.queue.checkpoint_committed(self.state.lineage, committed.step)
            self._saved_metrics = {"time/checkpoint_write_s": committed.write_s}
            logger.info("the checkpoint of step %d is complete, after %.1f s", committed.step, committed.write_s)

    def _commit_despite_error(self) -> None:
        """Commit the checkpoint that is being written, because the run ends with an error that does not concern it."""
        try:
            self._commit(wait=True)
        except Exception as error:
            logger.warning("the checkpoint of step %d is not complete: %s", self._last_checkpoint, error)

    def _confirm(self) -> None:
        """Raise LineageError if a newer learner has taken over the run."""
        self.queue.confirm(self.state.lineage)

    def _begin(self) -> None:
        """Publish the first weights. A new run waits for its first evaluation, sampled only with version 0."""
        if self.state.is_resumed:
            self._evaluations.request_pending()
            self._publish()
        else:
            self._evaluations.request_all()
            self._publish()
            self._await_evaluations("the evaluation before training")
        self._clock.start_lap()
        for part in self._parts:
            part.begin()

    def _finish(self) -> None:
        """Publish, checkpoint and evaluate the final version, even if the run ended early.

        The checkpoint comes first: a learner that dies in the last evaluation repeats only that.
        """
        if self._publisher.is_due(is_last=True):
            self._publish(is_last=True)
        if self._last_checkpoint != self.state.step:
            self._checkpoint()
        self._commit(wait=True)
        self._evaluations.request_last()
        self._await_evaluations("the evaluation after training")
        self.state.elapsed_s = self._clock.elapsed_s
