"""What all commands that train on given rows have in common: from a config to a Hugging Face directory.

A command runs alone or under torchrun. The same command continues from the last checkpoint. SIGTERM and SIGINT save the
last step first, within ``checkpoint.grace_s`` seconds. The order of the rows depends only on the seed and the step, so
a resumed run sees the same batches. ``OfflineTask`` is what a command adds of its own.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from async_rl.config.config import Config
from async_rl.config.learner import check_offload
from async_rl.config.offline import OfflineConfig
from async_rl.data.chat import load_tokenizer, model_directory, vocabulary_size
from async_rl.data.turn_end import turn_ends
from async_rl.data.untrained_rows import untrained_end
from async_rl.data.vocabulary import check_embedded
from async_rl.errors import ConfigError, RunError, StoppedError
from async_rl.extensions.offline.batches import batch_of
from async_rl.extensions.offline.rows import RowEncoder, digest_of
from async_rl.extensions.offline.slopes import SlopeObjective
from async_rl.learner.checkpoints.files import latest_checkpoint, read_extra
from async_rl.learner.checkpoints.resume import find_resume_point, take_over
from async_rl.learner.checkpoints.writer import CheckpointWriter
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.roles import follow, lead
from async_rl.learner.export.model import check_export_target, export_checkpoint
from async_rl.learner.interface import Engine, UpdateStats
from async_rl.learner.losses.objective import Objective
from async_rl.learner.model.heads import Head
from async_rl.learner.optimizers.optimizer import Schedule
from async_rl.learner.ranks import Ranks, init_ranks
from async_rl.learner.sequences import TrainSequence
from async_rl.net.wire import decode, encode
from async_rl.output import logged
from async_rl.process.fault_points import fault_point
from async_rl.process.stop import StopRequest
from async_rl.run.directory import RunDir, checkpoint_name
from async_rl.run.following.follower import followed
from async_rl.run.following.sinks import check_sinks
from async_rl.run.lock import RunLock, acquire
from async_rl.run.records.step_log import StepLog

logger = logging.getLogger(__name__)

Row = TypeVar("Row")
Metrics = Mapping[str, float]
"""Key -> value of some metrics of a step."""

PROGRESS_S = 5.0
TICK_S = 0.5
"""Seconds between two signs of life for the other ranks while the first one waits for the files of a checkpoint."""
_LEARNED_BY = ("model", "lora", "optimizer")
_NOT_LEARNED_BY = ("out", "checkpoint_every", "eval", "eval_every")


class OfflineTask(ABC, Generic[Row]):
    """What one command does of its own, on rows of its own kind.

    Attributes:
        name: the command. Its files are in ``run.dir/NAME``.
        head: what the model computes.
        config: the run's config.
    """

    name: ClassVar[str]
    head: ClassVar[Head] = "tokens"

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    @abstractmethod
    def section(self) -> OfflineConfig:
        """The command's section of the config, which has the command's name."""

    @property
    def objective(self) -> Objective:
        """The loss that the engine trains with: that of slopes, if the command has no other."""
        return SlopeObjective()

    def build_engine(self, ranks: Ranks, schedule: Schedule) -> FsdpEngine:
        """Return the engine. All ranks call this."""
        return FsdpEngine(
            self.config, ranks, objective=self.objective, schedule=schedule, max_length=self.section.max_length,
            head=self.head,
        )  # fmt: skip

    @property
    def sources(self) -> dict[str, str]:
        """The datasets by the config keys that name them: the training rows, and those of the evaluations."""
        return {f"{self.name}.data": self.section.data or ""} | {
            f"{self.name}.eval.{name}": source for name, source in self.section.eval.items()
        }

    def encoder(self) -> RowEncoder:
        """Return what turns rows into tokens."""
        path, arguments = self.config.model.path, self.config.data.template_arguments
        tokenizer = load_tokenizer(path, needs_template=False)
        ends = turn_ends(tokenizer, model_directory(path), arguments)
        return RowEncoder(tokenizer, arguments, max_length=self.section.max_length, section=self.name, ends=ends)

    @abstractmethod
    def load_rows(self, source: str, key: str) -> list[Row]:
        """Read and tokenise the dataset ``source``. ``key`` is the config key that names it.

        Raises:
            DataError: the dataset can't be read, or has no row or a bad row.
        """

    @abstractmethod
    def sequences(self, row: Row) -> Sequence[TrainSequence]:
        """Return the sequences of one row."""

    def check_tokens(self, rows: Sequence[Row], key: str) -> None:
        """Check that the model's embedding has a row for each token of ``rows``, those of the config key ``key``.

        Raises:
            ModelError: it has not.
        """
        path = self.config.model.path
        tokenizer, num_rows = load_tokenizer(path, needs_template=False), vocabulary_size(path)
        for sequence in (one for row in rows for one in self.sequences(row)):
            check_embedded(sequence.token_ids, num_rows, tokenizer, key)

    def longest(self, rows: Sequence[Row]) -> int:
        """Return the number of tokens of the longest sequence of ``rows``, of which there is at least one."""
        return max(len(sequence.token_ids) for row in rows for sequence in self.sequences(row))

    def figure(self, row: Row) -> float:
        """Return the number that the loss reads of a row beside its sequences; 0 if there is none."""
        return 0.0

    def prepare(
        self, engine: Engine, rows: Sequence[Row], directory: Path, check_stop: Callable[[str], None]
    ) -> Sequence[Row]:
        """Return the rows with what the engine's starting weights say of them, before a checkpoint is read.

        Args:
            engine: has the weights that the run begins with.
            rows: those of one dataset.
            directory: the command's folder of the run directory.
            check_stop: is called now and then with what is saved; raises StoppedError if a signal asked to stop.
        """
        return rows

    @abstractmethod
    def step(self, engine: Engine, batch: Sequence[Row]) -> tuple[UpdateStats, Metrics]:
        """Make one optimizer step on ``batch``. Return its statistics, and its metrics: ``loss`` and others."""

    @abstractmethod
    def evaluate(self, engine: Engine, rows: Sequence[Row]) -> Metrics:
        """Return the metrics of ``rows`` under the current weights: ``loss`` and others. Nothing is trained."""

    def export(self, checkpoint: Path, out: Path) -> None:
        """Write the model of ``checkpoint`` to the directory ``out``."""
        export_checkpoint(checkpoint, out)


def run_offline(task: OfflineTask[Any]) -> None:
    """Train ``model.path`` on the rows of ``task``, and export the trained model. A finished run is left as it is.

    Raises:
        ConfigError: ``data`` or ``out`` of the task's section is not set.
        DataError: a row is bad. The message names file and line.
        ModelError: the model is missing or can't be trained.
        RunError: ``out`` holds other files, or the run directory belongs to other settings or rows.
        TrainingError: another rank failed.
        SystemExit: a signal asked to stop. The code is 128 + signal, and the last step is saved.
    """
    config, section = task.config, task.section
    for key in ("data", "out"):
        if not getattr(section, key):
            raise ConfigError(f"{task.name}.{key}: expected a value, got none; set it in the file or with --set")
    if config.checkpoint.mirror is not None:
        raise ConfigError("checkpoint.mirror: expected none, because only launch and learner mirror a run; remove it")
    check_sinks(config)
    done, num_steps = _saved_steps(task)
    out = Path(section.out)
    if done and done == num_steps and out.is_dir() and any(out.iterdir()):
        logger.info("finished already: %s holds the model of step %d", out, done)
        return
    check_export_target(out)
    ranks = init_ranks(config)
    check_offload(config.learner.offload, ranks.device.type, has_reference=True)  # the engine knows about references
    with ranks.together("reading the rows"):
        rows = _load_rows(task) if ranks.is_leader else _Rows([], {}, "")
        num_steps = _agree(ranks, section.num_steps(len(rows.train)))
    with logged(logger, f"loading the model {config.model.path}"):
        engine = task.build_engine(ranks, _schedule(config, section, num_steps))
    if ranks.is_leader:
        if task.name != "rm" and (problem := untrained_end(config)):  # a reward model samples nothing
            logger.warning("warning: %s", problem)
        leader = _Leader(task, engine, rows, done=done, num_steps=num_steps)
        lead(engine, ranks, config.checkpoint.grace_s, leader.train)
    else:
        follow(engine, ranks, config.checkpoint.grace_s)


@dataclass(frozen=True, slots=True)
class _Rows(Generic[Row]):
    """The training rows, those of each evaluation, and the digest of the training rows' tokens."""

    train: Sequence[Row]
    evaluations: Mapping[str, Sequence[Row]]
    digest: str


class _Leader(Generic[Row]):
    """Rank 0 of a run: it trains, writes metrics and checkpoints, and exports the model."""

    def __init__(
        self, task: OfflineTask[Row], engine: FsdpEngine, rows: _Rows[Row], *, done: int, num_steps: int
    ) -> None:
        self._task, self._engine, self._rows = task, engine, rows
        self._config, self._section = task.config, task.section
        self._run_dir, self._done, self._num_steps = _run_dir(task), done, num_steps
        self._stop_signal: Callable[[], int] = lambda: 0

    def train(self, stop: StopRequest) -> None:
        """Resume, train and export.

        Raises:
            StoppedError: a signal asked to stop, and the last step is saved.
        """
        self._stop_signal = stop.check
        with closing(acquire(RunDir(self._run_dir), self._task.name)) as lock:
            self._train_and_export(lock)

    def _train_and_export(self, lock: RunLock) -> None:
        num_tokens = sum(len(s.token_ids) for row in self._rows.train for s in self._task.sequences(row))
        logger.info(
            "%d rows, %d tokens; %d steps of %d rows", len(self._rows.train), num_tokens, self._num_steps,
            self._section.batch_size,
        )  # fmt: skip
        self._rows = _Rows(
            self._prepared(self._rows.train),
            {name: self._prepared(rows) for name, rows in self._rows.evaluations.items()},
            self._rows.digest,
        )
        self._resume(lock)
        checkpoints = CheckpointWriter(
            self._engine, self._run_dir, self._config.checkpoint, lineage=self._task.name, confirm=lock.check
        )
        with closing(checkpoints) as writer:
            try:
                with self._open_metrics(lock) as write:
                    self._make_steps(writer, write)
            except Exception:
                with suppress(Exception):  # the error is the news; an older checkpoint stays
                    self._commit(writer, wait=True)
                raise
        newest = latest_checkpoint(self._run_dir)
        if newest is None:
            raise RunError(
                f"expected a checkpoint in {self._run_dir} at the end of training, got none; this is a bug in "
                f"async-rl, please report it"
            )
        fault_point("offline.trained_all")  # the last checkpoint is committed, the model is not exported
        self._engine.close()  # the export of a large model may outlast the timeout of the other ranks
        with logged(logger, f"exporting the model to {self._section.out}"):
            self._task.export(newest, Path(self._section.out))
        logger.info("wrote %s", self._section.out)

    def _prepared(self, rows: Sequence[Row]) -> Sequence[Row]:
        return self._task.prepare(self._engine, rows, self._run_dir, self._check_stop)

    def _check_stop(self, saved: str) -> None:
        """Raise StoppedError if a signal asked to stop before training. ``saved`` says what is saved."""
        if signum := self._stop_signal():
            raise StoppedError(f"stopped by {signal.Signals(signum).name}: {saved}; the same command goes on there")

    def _resume(self, lock: RunLock) -> None:
        """Continue from the newest checkpoint, if there is one."""
        point = find_resume_point(self._run_dir)
        take_over(self._run_dir, point, lineage=self._task.name, confirm=lock.check)
        newest = point.checkpoint
        if newest is not None:
            with logged(logger, f"reading {newest}"):
                self._engine.load(newest)
            logger.info("going on from %s", newest)
        with closing(StepLog(self._run_dir / "metrics.jsonl")) as log:
            log.rewind_to(self._done)

    @contextmanager
    def _open_metrics(self, lock: RunLock) -> Iterator[Callable[[Mapping[str, float | None]], None]]:
        """Open ``metrics.jsonl``, which the sinks of ``log.to`` follow. Yield the function that writes a row."""
        name = f"{self._config.run.name or Path(self._config.run.dir).name}-{self._task.name}"
        run_dir = RunDir(self._run_dir)
        with (
            followed(self._config, run_dir, lock, logger.warning, part=name) if self._config.log.to else nullcontext(),
            closing(StepLog(run_dir.metrics)) as log,
        ):
            yield log.write

    def _make_steps(self, writer: CheckpointWriter, write: Callable[[Mapping[str, float | None]], None]) -> None:
        """Make the steps that are left. A checkpoint is written while the next steps are made.

        ``write`` writes a step's row of metrics.

        Raises:
            StoppedError: a signal asked to stop after a step, and that step is saved.
        """
        every, progress = self._section.checkpoint_every, _Progress(self._done, self._num_steps)
        for step in range(self._done + 1, self._num_steps + 1):
            row = self._make_step(step, progress)
            fault_point("offline.trained")  # the optimizer has stepped, its row of metrics is not written
            write(row)
            signum = self._stop_signal()
            is_last = bool(signum) or step == self._num_steps
            is_due = is_last or bool(every and step % every == 0)
            self._commit(writer, wait=is_due)
            if is_due:
                extra = {"step": step, "num_steps": self._num_steps, "rows": self._rows.digest}
                writer.begin(step, {**extra, "settings": _settings(self._task)})
                self._commit(writer, wait=is_last)
            if signum:
                raise StoppedError(
                    f"stopped by {signal.Signals(signum).name}: saved at step {step}; the same command resumes "
                    f"from {checkpoint_name(step)}"
                )

    def _make_step(self, step: int, progress: _Progress) -> dict[str, float | None]:
        """Make one step. Return its row of ``metrics.jsonl``."""
        section = self._section
        batch = batch_of(
            self._rows.train, step - 1, batch_size=section.batch_size, seed=self._config.run.seed, epochs=section.epochs
        )
        stats, metrics = self._task.step(self._engine, batch)
        if not stats.stepped:
            logger.warning("step %d: the optimizer step is skipped: %s", step, stats.reason)
        progress.log(step, stats, metrics["loss"])
        row = {
            "step": step, "loss": metrics["loss"], "lr": stats.lr, "tokens": stats.tokens_trained,
            "grad_norm": stats.grad_norm,
        }  # fmt: skip
        if stats.padded_cost is not None:
            row["packing/padding"] = stats.padded_cost.padding
        row |= metrics
        if step == self._num_steps or (section.eval_every and step % section.eval_every == 0):
            row |= self._evaluate(step)
        # JSON has no NaN and no infinities.
        return {key: value if math.isfinite(value) else None for key, value in row.items()}

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of all evaluations."""
        found: dict[str, float] = {}
        for name, rows in self._rows.evaluations.items():
            metrics = self._task.evaluate(self._engine, rows)
            logger.info(
                "step %d: %s: %s", step, name, "  ".join(f"{key} {value:.4f}" for key, value in metrics.items())
            )
            found |= {f"eval/{name}/{key}": value for key, value in metrics.items()}
        return found

    def _commit(self, writer: CheckpointWriter, *, wait: bool) -> None:
        """Commit the checkpoint that is being written, if its files are written. With ``wait``, wait for them."""
        while wait and not writer.is_written(TICK_S):
            self._engine.tick()
        writer.poll()


class _Progress:
    """Logs progress, every few seconds and after the last step."""

    def __init__(self, done: int, num_steps: int) -> None:
        self._num_steps = num_steps
        self._said, self._said_step, self._tokens = time.monotonic(), done, 0

    def log(self, step: int, stats: UpdateStats, loss: float) -> None:
        """Log ``step``, if it is time."""
        self._tokens += stats.tokens_trained
        elapsed = time.monotonic() - self._said
        if elapsed < PROGRESS_S and step < self._num_steps:
            return
        logger.info(
            "step %d/%d  loss %.4f  lr %.2e  %.1f steps/s  %.0f trained tokens/s", step, self._num_steps, loss,
            stats.lr, (step - self._said_step) / elapsed, self._tokens / elapsed,
        )  # fmt: skip
        self._said, self._said_step, self._tokens = time.monotonic(), step, 0


def _run_dir(task: OfflineTask[Any]) -> Path:
    return Path(task.config.run.dir) / task.name


def _load_rows(task: OfflineTask[Row]) -> _Rows[Row]:
    """Return the rows of all datasets. All fit in a micro-batch.

    Raises:
        RunError: the newest checkpoint was trained on other rows.
    """
    config, section = task.config, task.section
    found: dict[str, list[Row]] = {}
    for key, source in task.sources.items():
        found[key] = task.load_rows(source, key)
        task.check_tokens(found[key], key)
        longest = task.longest(found[key])
        if longest > config.longest_sequence:
            raise ConfigError(
                f"{config.longest_sequence_keys}: expected at least the longest row of {key}, {longest} tokens, got "
                f"{config.longest_sequence}; raise it, or lower {task.name}.max_length"
            )
    train = found[f"{task.name}.data"]
    digest = digest_of((one for row in train for one in task.sequences(row)), [task.figure(row) for row in train])
    newest = find_resume_point(_run_dir(task)).checkpoint
    if newest is not None and read_extra(newest)["rows"] != digest:
        raise RunError(
            f"{task.name}.data: expected the rows that {newest} was trained on, got others in {section.data}; restore "
            f"them, choose another run.dir, or remove {_run_dir(task)}"
        )
    return _Rows(train, {name: found[f"{task.name}.eval.{name}"] for name in section.eval}, digest)


def _agree(ranks: Ranks, num_steps: int) -> int:
    """Return rank 0's ``num_steps`` on all ranks, because only rank 0 knows the rows."""
    if ranks.is_leader:
        ranks.broadcast(encode("steps", {"num_steps": num_steps}))
        return num_steps
    return int(decode(ranks.receive()).fields["num_steps"])


def _schedule(config: Config, section: OfflineConfig, num_steps: int) -> Schedule:
    return Schedule(
        kind=section.schedule,
        lr=section.lr,
        warmup_updates=section.warmup_steps,
        total_updates=num_steps,
        min_ratio=config.optimizer.min_lr_ratio,
    )


def _settings(task: OfflineTask[Any]) -> dict[str, Any]:
    """Return the settings that the trained weights depend on, by ``section.key``."""
    config, own = task.config, task.section
    sections = {name: getattr(config, name) for name in _LEARNED_BY} | {task.name: own}
    flat = {
        f"{name}.{key}": value for name, of in sections.items() for key, value in of.model_dump(mode="json").items()
    }
    for key in _NOT_LEARNED_BY:
        flat.pop(f"{task.name}.{key}", None)
    if own.epochs is None:
        flat[f"{task.name}.steps"] = own.num_steps(0)
    return flat | {
        "run.seed": config.run.seed,
        "data.chat_template_kwargs": config.data.chat_template_kwargs,
        "data.tools": config.data.tools,
        "data.special_tokens_in_content": config.data.special_tokens_in_content,
    }


def _saved_steps(task: OfflineTask[Any]) -> tuple[int, int]:
    """Return the number of steps that the newest checkpoint has, and of all steps of its run. 0 and 0 if there is none.

    Raises:
        RunError: it belongs to other settings.
    """
    newest = find_resume_point(_run_dir(task)).checkpoint
    if newest is None:
        return 0, 0
    extra = read_extra(newest)
    before: Mapping[str, Any] = extra["settings"]
    changes = [(key, before.get(key), value) for key, value in _settings(task).items()]
    differing = [f"{key}: {old!r} -> {new!r}" for key, old, new in changes if old != new]
    if differing:
        raise RunError(
            f"{_run_dir(task)} belongs to other settings (old -> new: {'; '.join(differing)}); choose another run.dir, "
            f"or remove that directory"
        )
    return int(extra["step"]), int(extra["num_steps"])
