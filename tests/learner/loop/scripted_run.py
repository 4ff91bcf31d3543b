"""The learner's loop over the real queue, checkpoints and metrics, in this process, with an engine that is scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.learner.checkpoints.files import TrainerState, write_extra
from async_rl.learner.checkpoints.resume import find_resume_point
from async_rl.learner.interface import Engine, PolicyScores, UpdateStats
from async_rl.learner.loop.publishing import FixedLagWeights, NamedTensors, Published, WeightsSender
from async_rl.learner.loop.rollout_records import RolloutRecords
from async_rl.learner.loop.start import _restore, _take_files_over, step_parts
from async_rl.learner.loop.trainer import Trainer
from async_rl.learner.sampling import SamplingEngine
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.core import learner_requests
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.records import FinishReason, Group, Lease, Rollout, TokenSequence
from async_rl.run.directory import RunDir
from async_rl.run.records.step_log import read_rows
from tests.learner.loop.direct_queue import DirectQueue
from tests.learner.saves_at_once import SavesAtOnce
from tests.queue.builders import group, make_config, rows
from tests.run.metric_keys import declared_key

PLAIN_STATS = UpdateStats(
    stepped=True, reason="", loss=0.5, grad_norm=1.0, lr=1.0, tokens_trained=2, ratio_mean=1.0, ratio_max=1.0,
    clip_fraction=0.0, ess=1.0, entropy=0.25, mean_abs_log_ratio=0.0,
)  # fmt: skip
"""What an update reports that stepped, on policy."""


class Killed(BaseException):
    """The learner's process is gone."""


@dataclass
class ScriptedEngine(SavesAtOnce):
    """Steps, or skips, as ``stepped`` tells it; then it steps. Its checkpoint is the extra data alone.

    Attributes:
        calls: the version and the sequences of each update.
        scored: what was scored, after how many updates.
    """

    stepped: list[bool] = field(default_factory=list)
    calls: list[tuple[int, list[TrainSequence]]] = field(default_factory=list)
    scored: list[tuple[str, int]] = field(default_factory=list)
    grad_norm: float = 1.0

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.calls]

    @property
    def trained_on(self) -> list[TrainSequence]:
        return [sequence for _, sequences in self.calls for sequence in sequences]

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        self.calls.append((version, list(sequences)))
        stats = replace(PLAIN_STATS, tokens_trained=sum(int(s.loss_mask.sum()) for s in sequences))
        if not self.stepped or self.stepped.pop(0):
            return stats
        return replace(stats, stepped=False, reason="the gradient norm is nan", grad_norm=self.grad_norm)

    def score(self, sequences: Sequence[TrainSequence], *, of: str) -> dict[int, np.ndarray]:
        """-1 a token of the reference, -2 of the policy."""
        self.scored.append((of, len(self.calls)))
        logprob = {"reference": -1.0, "policy": -2.0}[of]
        return {s.sequence_id: np.full(int(s.loss_mask.sum()), logprob, np.float32) for s in sequences}

    def score_policy(self, sequences: Sequence[TrainSequence]) -> dict[int, PolicyScores]:
        return {i: PolicyScores(v, np.zeros_like(v)) for i, v in self.score(sequences, of="policy").items()}

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        write_extra(directory, extra)

    def load(self, directory: Path) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class DigestWeights:
    """Every version's digest is its number after ``name``, as the answers say."""

    channel: str = "tcp://127.0.0.1:1"
    ports: tuple[int, ...] = (1, 2)
    name: str = "digest"
    published: list[int] = field(default_factory=list)

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published:
        self.published.append(version)
        return Published(version, f"{self.name}-{version}")

    def stats(self) -> dict[str, float]:
        return {}


Answer = Callable[[Lease, int], Group]


def answered(lease: Lease, version: int) -> Group:
    """A right and a wrong answer; to an evaluation the right one alone."""
    return group(lease, version, accuracies=[1.0, 0.0][: lease.group_size])


def all_wrong(lease: Lease, version: int) -> Group:
    return group(lease, version, accuracies=[0.0, 0.0][: lease.group_size])


def cut_short(lease: Lease, version: int) -> Group:
    return group(lease, version, accuracies=[1.0, 0.0][: lease.group_size], finish_reason="length")


def drawn_rollout(
    generator: np.random.Generator, version: int, accuracy: float, *, logprobs: tuple[float, float] = (-4.0, -3.5),
    finish_reason: FinishReason = "stop", **parts: float,
) -> Rollout:  # fmt: skip
    """Of 4 to 12 random tokens after a prompt of 2, with behavior log-probabilities in this range."""
    size = int(generator.integers(6, 15))
    mask = np.arange(size) >= 2
    sequence = TokenSequence(
        token_ids=generator.integers(4, 40, size).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, generator.uniform(*logprobs, size), 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
    )
    return Rollout((sequence,), {"correct": accuracy, **parts}, accuracy, finish_reason)


def never(request: str, step: int) -> None: ...


def killed_in(wanted: str, at_step: int) -> Callable[[str, int], None]:
    """Dies when it is about to send ``wanted`` at ``at_step``."""

    def before(request: str, step: int) -> None:
        if (request, step) == (wanted, at_step):
            raise Killed

    return before


@dataclass
class Run:
    """One run directory and one queue, through any number of learner starts."""

    config: Config
    queue_state: QueueState
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    weights: DigestWeights = field(default_factory=DigestWeights)
    queue: DirectQueue | None = None

    @property
    def path(self) -> Path:
        return Path(self.config.run.dir)

    def start(
        self, before: Callable[[str, int], None] = never, answer: Answer = answered, *,
        stop_signal: Callable[[], int] = lambda: 0, sampling: SamplingEngine | None = None,
    ) -> TrainerState:  # fmt: skip
        """One learner start, as ``start.train_with`` does it."""
        engine = cast(Engine, self.engine)
        point = find_resume_point(self.path)
        restored = _restore(engine, point.checkpoint, self.config)
        state, snapshot = restored.state, restored.snapshot
        run_dir, written = RunDir(self.path), ExitStack()
        steps = self.config.learner.steps
        learner_requests.attach(
            self.queue_state, state.lineage, state.parent_lineage, state.fork_version, state.step, steps, snapshot, 0.0
        )
        self.queue = queue = DirectQueue(self.queue_state, answer=answer, before=before)
        metrics, trained, summaries = _take_files_over(
            run_dir, point, state, self.config, written, confirm=lambda: queue.confirm(state.lineage)
        )
        weights: WeightsSender = self.weights
        if self.config.learner.fixed_lag is not None:
            weights = FixedLagWeights(weights, self.config.learner.fixed_lag)
        queue = cast(LearnerQueue, self.queue)
        parts = step_parts(
            self.config, state, gate=None, critic=getattr(self.engine, "critic", None), sampling=sampling,
            address="tcp://q:1",
        )  # fmt: skip
        parts = [*parts, RolloutRecords(self.config, state, run_dir=run_dir, summaries=summaries, decode=str)]
        trainer = Trainer(
            self.config, state=state, engine=engine, queue=queue, weights=weights, metrics=metrics, step_log=trained,
            run_dir=self.path, decode=str, parts=parts, probes=None, stop_signal=stop_signal,
        )  # fmt: skip
        try:
            trainer.run()
            self.queue.finish(state.lineage)
        finally:
            written.close()
        keys = {key for row in self.all_rows for key in row}
        assert [key for key in keys if declared_key(key) is None] == [], "declare them in run/records/metric_table.py"
        return state

    def dies(self, wanted: str, at_step: int) -> None:
        with pytest.raises(Killed):
            self.start(killed_in(wanted, at_step))

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path / "metrics.jsonl")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Those of steps."""
        return [row for row in self.all_rows if "version" in row]

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def evals(self) -> list[int]:
        return [row["step"] for row in self.all_rows if "eval/test/accuracy" in row]

    @property
    def positions(self) -> list[list[int]]:
        """Those of the groups of each step of the surviving history."""
        return [[position for position, _ in row["groups"]] for row in read_rows(self.path / "trained.jsonl")]

    @property
    def all_positions(self) -> list[int]:
        return [position for step in self.positions for position in step]

    @property
    def ledger(self) -> Mapping[str, Any]:
        self.queue_state.check()
        return self.queue_state.stats().ledger

    @property
    def dropped(self) -> dict[str, int]:
        return {cause: n for cause, n in self.ledger["groups"]["dropped"].items() if n}


def retune(run: Run, /, **sections: Mapping[str, Any]) -> None:
    """Let the run's next learner start, and its queue server, have other values of some keys."""
    raw = run.config.model_dump(mode="json", exclude_none=True)
    changed = {name: {**raw[name], **values} for name, values in sections.items()}
    run.config = parse_config({**raw, **changed}, "test")
    run.queue_state.settings = QueueSettings.from_config(run.config, vocab_size=None)


def make_run(directory: Path, *, num_rows: int = 100, **sections: Mapping[str, Any]) -> Run:
    data = {"train": "none.jsonl", "shuffle": False, "eval": {"test": "none.jsonl"}, **sections.pop("data", {})}
    # Whether a checkpoint in the background is complete when the learner dies would be a matter of chance.
    checkpoint = {"every": 2, "asynchronous": False}
    defaults: dict[str, Mapping[str, Any]] = {"checkpoint": checkpoint, "eval": {"every": 2}, "learner": {"steps": 5}}
    merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
    config = make_config(str(directory / "run"), data=data, **merged)
    (directory / "run").mkdir(parents=True, exist_ok=True)
    stream = PromptStream(num_rows, seed=0, shuffle=False, epochs=config.data.epochs)
    return Run(config, QueueState(QueueSettings.from_config(config, vocab_size=None), rows(num_rows), stream))
