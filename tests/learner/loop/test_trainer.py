"""The learner's loop over the real queue, checkpoints and metrics: deaths and restarts, skips, ends, publications."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import RunStoppedError, TrainingError
from async_rl.learner.checkpoints.files import TrainerState, latest_checkpoint, write_extra
from async_rl.learner.checkpoints.resume import find_resume_point
from async_rl.learner.interface import Engine, PolicyScores, UpdateStats
from async_rl.learner.loop.parity import ParityGate
from async_rl.learner.loop.publishing import FixedLagWeights, NamedTensors, Published, WeightsSender
from async_rl.learner.loop.rollout_records import RolloutRecords
from async_rl.learner.loop.start import _restore, _take_files_over, step_parts
from async_rl.learner.loop.trainer import Trainer
from async_rl.learner.sampling import SamplingEngine
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.records import Group, Lease, TokenSequence
from async_rl.run.directory import RunDir
from async_rl.run.records.step_log import read_rows
from tests.learner.loop.direct_queue import NUM_EVAL_ROWS, DirectQueue
from tests.learner.saves_at_once import SavesAtOnce
from tests.queue.builders import group, make_config, rows
from tests.run.metric_keys import declared_key


class Killed(BaseException):
    """The learner's process is gone."""


@dataclass
class ScriptedEngine(SavesAtOnce):
    """Steps, or skips, as it is told; then it steps. Its checkpoint is the extra data alone."""

    stepped: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    scored: list[tuple[str, int]] = field(default_factory=list)
    trained_on: list[TrainSequence] = field(default_factory=list)
    grad_norm: float = 1.0

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        self.versions.append(version)
        self.trained_on += sequences
        stepped = self.stepped.pop(0) if self.stepped else True
        tokens = sum(int(s.loss_mask.sum()) for s in sequences)
        grad_norm = 1.0 if stepped else self.grad_norm
        return UpdateStats(
            stepped=stepped, reason="" if stepped else "the gradient norm is nan", loss=0.0, grad_norm=grad_norm,
            lr=1.0, tokens_trained=tokens, ratio_mean=1.0, ratio_max=1.0, clip_fraction=0.0, ess=1.0, entropy=0.0,
            mean_abs_log_ratio=0.0,
        )  # fmt: skip

    def score(self, sequences: Sequence[TrainSequence], *, of: str) -> dict[int, np.ndarray]:
        """-1 a token of the reference, -2 of the policy."""
        self.scored.append((of, len(self.versions)))
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


def answered(lease: Lease, version: int) -> Group:
    return group(lease, version, accuracies=[1.0, 0.0][: lease.group_size])


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
        self, before: Callable[[str, int], None] = never, answer: Callable[[Lease, int], Group] = answered, *,
        has_parity: bool = False, stop_signal: Callable[[], int] = lambda: 0, sampling: SamplingEngine | None = None,
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
        gate = ParityGate(self.config, engine, queue, dtype="float32") if has_parity else None
        trainer = Trainer(
            self.config,
            state=state,
            engine=engine,
            queue=queue,
            weights=weights,
            metrics=metrics,
            step_log=trained,
            run_dir=self.path,
            decode=str,
            parts=[
                *step_parts(
                    self.config,
                    state,
                    gate=gate,
                    critic=getattr(self.engine, "critic", None),
                    sampling=sampling,
                    address="tcp://q:1",
                ),
                RolloutRecords(self.config, state, run_dir=run_dir, summaries=summaries, decode=str),
            ],
            probes=gate,
            stop_signal=stop_signal,
        )
        try:
            trainer.run()
            self.queue.finish(state.lineage)
        finally:
            written.close()
        keys = {key for row in read_rows(self.path / "metrics.jsonl") for key in row}
        assert [key for key in keys if declared_key(key) is None] == [], "declare them in run/records/metric_table.py"
        return state

    def dies(self, wanted: str, at_step: int) -> None:
        with pytest.raises(Killed):
            self.start(killed_in(wanted, at_step))

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in read_rows(self.path / "metrics.jsonl") if "version" in row]

    @property
    def evals(self) -> list[int]:
        return [row["step"] for row in read_rows(self.path / "metrics.jsonl") if "eval/test/accuracy" in row]

    @property
    def dropped(self) -> dict[str, int]:
        self.queue_state.check()
        return {cause: n for cause, n in self.queue_state.stats().ledger["groups"]["dropped"].items() if n}


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


def test_a_run_evaluates_first_between_and_last_and_every_answer_is_delivered(tmp_path: Path):
    run = make_run(tmp_path)
    state = run.start()
    assert (run.steps, run.evals) == ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    assert (state.step, state.version) == (5, 5)
    eval_groups = run.queue_state.stats().ledger["eval"]["groups"]
    assert eval_groups["delivered"] == eval_groups["issued"] == 4 * NUM_EVAL_ROWS


def test_every_set_is_evaluated_at_its_own_steps_and_at_the_start_and_the_end(tmp_path: Path):
    run = make_run(
        tmp_path,
        data={"eval": {"test": "a.jsonl", "rare": "b.jsonl", "often": "c.jsonl"}},
        eval={"sets": {"rare": {"every": 0}, "often": {"every": 1}}},
    )
    run.start()
    assert run.queue is not None
    asked = {name: [step for of, step, _ in run.queue.asked if of == name] for name in ("test", "rare", "often")}
    assert asked == {"test": [0, 2, 4, 5], "rare": [0, 5], "often": [0, 1, 2, 3, 4, 5]}
    assert all(exclusive == (step in (0, 5)) for _, step, exclusive in run.queue.asked)
    assert sorted(path.name for path in (run.path / "eval").glob("rare-*")) == [
        "rare-step-000000.jsonl", "rare-step-000005.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize(("request_name", "at_step"), [("await_eval", 0), ("take", 0), ("take", 1), ("ack", 1)])
def test_a_learner_killed_before_its_first_checkpoint_starts_over(tmp_path: Path, request_name: str, at_step: int):
    run = make_run(tmp_path)
    run.dies(request_name, at_step)
    assert latest_checkpoint(run.path) is None
    before = len(read_rows(run.path / "metrics.jsonl"))
    run.start()
    assert run.queue is not None
    assert run.queue.asked[0] == ("test", 0, True)
    assert (run.steps, run.evals) == ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    aside = run.path / "metrics.rolled_back-1.jsonl"
    assert len(read_rows(aside)) == before
    assert run.queue_state.stats().ledger["groups"]["trained"] == 10
    assert (run.dropped.get("rolled_back", 0) > 0) == (request_name != "await_eval")


def test_a_finished_run_with_more_steps_goes_on_from_its_last_one(tmp_path: Path):
    run = make_run(tmp_path)
    run.start()
    retune(run, learner={"steps": 8})
    state = run.start()
    assert (run.steps, run.evals) == ([1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 4, 5, 6, 8])
    assert (state.step, state.version) == (8, 8)
    assert run.queue_state.stats().ledger["groups"]["trained"] == 16


def test_data_that_ended_goes_on_with_more_epochs(tmp_path: Path):
    run = make_run(tmp_path, num_rows=4, data={"epochs": 1})
    assert run.start().exhausted
    assert run.steps == [1, 2]
    retune(run, data={"epochs": 2})
    PromptStream.__init__(run.queue_state.stream, 4, seed=0, shuffle=False, epochs=2)
    assert run.start().exhausted
    assert run.steps == [1, 2, 3, 4]


def trained_positions(run: Run) -> list[list[int]]:
    """The positions of the groups of each step of the surviving history."""
    return [[position for position, _ in row["groups"]] for row in read_rows(run.path / "trained.jsonl")]


def test_the_last_step_of_the_data_trains_on_what_is_left(tmp_path: Path):
    # Seven rows, two groups a step: the fourth step has one group.
    run = make_run(tmp_path, num_rows=7, data={"epochs": 1}, learner={"steps": 99})
    state = run.start()
    assert (state.step, state.version, state.exhausted) == (4, 4, True)
    assert trained_positions(run) == [[0, 1], [2, 3], [4, 5], [6]]
    assert (run.steps, run.evals) == ([1, 2, 3, 4], [0, 2, 4])
    ledger = run.queue_state.stats().ledger["groups"]
    assert (ledger["issued"], ledger["trained"], run.dropped) == (7, 7, {})
    assert latest_checkpoint(run.path) == run.path / "checkpoints" / "step-000004"


def test_a_smaller_batch_makes_fewer_updates_of_the_usual_size(tmp_path: Path):
    # Four groups a step in two updates of two. What is left are three groups: updates of two and of one; or one group.
    for num_rows, last in ((7, [2, 1]), (5, [1])):
        run = make_run(
            tmp_path / f"{num_rows}", num_rows=num_rows, data={"epochs": 1}, queue={"max_staleness": 2},
            learner={"steps": 99, "groups_per_step": 4, "updates_per_batch": 2},
        )  # fmt: skip
        run.engine = engine = CountingEngine()
        state = run.start()
        assert [num // 2 for num in engine.num_sequences] == [2, 2, *last]
        assert (state.step, state.version) == (2, 2 + len(last))
        assert (run.queue_state.stats().ledger["groups"]["trained"], run.dropped) == (num_rows, {})


@dataclass
class CountingEngine(ScriptedEngine):
    """Remembers how many sequences each update had."""

    num_sequences: list[int] = field(default_factory=list)

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        self.num_sequences.append(len(sequences))
        return super().update(sequences, version=version)


@pytest.mark.parametrize(
    ("request_name", "at_step"), [("take", 2), ("ack", 2), ("take", 3), ("checkpoint_committed", 3), ("finish", 3)]
)
@pytest.mark.parametrize("every", [1, 2])
def test_a_learner_killed_around_a_smaller_last_step_trains_every_row_once(
    tmp_path: Path, request_name: str, at_step: int, every: int
):
    run = make_run(
        tmp_path, num_rows=5, data={"epochs": 1}, learner={"steps": 99},
        checkpoint={"every": every, "asynchronous": False},
    )  # fmt: skip
    run.dies(request_name, at_step)
    state = run.start()
    assert (state.step, state.exhausted) == (3, True)
    assert trained_positions(run) == [[0, 1], [2, 3], [4]]
    assert run.queue_state.stats().ledger["groups"]["trained"] == 5
    assert set(run.dropped) <= {"rolled_back"}


def test_the_rest_of_the_data_is_judged_by_best_k(tmp_path: Path):
    run = make_run(
        tmp_path, num_rows=3, data={"epochs": 1}, learner={"steps": 99}, loss={"best_k": 1, "mask_truncated": False}
    )
    assert run.start().step == 2
    ledger = run.queue_state.stats().ledger
    assert (ledger["groups"]["trained"], ledger["rollouts"]["trained"]) == (3, 3)
    assert ledger["rollouts"]["masked"] == {"best_k": 3}


def test_filtered_groups_leave_a_smaller_last_step_and_masked_ones_do_not(tmp_path: Path):
    def answer(lease: Lease, version: int) -> Group:
        accuracies = [1.0, 0.0] if lease.prompt.position % 3 else [0.0, 0.0]
        return group(lease, version, accuracies=accuracies[: lease.group_size])

    # Of rows 0 to 6, positions 0, 3 and 6 have wrong answers alone.
    run = make_run(tmp_path / "refill", num_rows=8, data={"epochs": 1}, learner={"steps": 99})
    assert run.start(answer=answer).step == 3
    assert trained_positions(run) == [[1, 2], [4, 5], [7]]
    masked = make_run(
        tmp_path / "masked", num_rows=7, data={"epochs": 1}, learner={"steps": 99}, queue={"refill": False}
    )
    state = masked.start(answer=answer)
    # The last step has only position 6, whose answers are masked.
    assert (state.step, state.version) == (4, 3)
    assert masked.dropped == {"step_skipped": 1}


def all_wrong(lease: Lease, version: int) -> Group:
    return group(lease, version, accuracies=[0.0, 0.0][: lease.group_size])


def test_data_of_which_no_group_can_be_trained_is_no_success(tmp_path: Path):
    run = make_run(tmp_path, num_rows=5, data={"epochs": 1})
    with pytest.raises(RunStoppedError) as stopped:
        run.start(answer=all_wrong)
    assert str(stopped.value).startswith(
        "this run has trained nothing: the data has ended (data.epochs); prompts: 5 filtered (5 with only wrong "
        "answers, 0 with only right ones). all 5 groups since the run began have only wrong answers. Read an answer"
    )
    assert (run.steps, latest_checkpoint(run.path)) == ([], None)
    # The same command, with data that the model can do, begins anew.
    assert run.start().step == 3
    assert trained_positions(run) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("steps", [2, 99])
def test_a_run_whose_steps_were_all_skipped_is_no_success(tmp_path: Path, steps: int):
    run = make_run(
        tmp_path, num_rows=4, data={"epochs": 1}, learner={"steps": steps}, experimental={"max_skipped_steps": 9}
    )
    run.engine.stepped = [False, False]
    with pytest.raises(RunStoppedError, match="this run has trained nothing: no step of 2 has changed the weights"):
        run.start()


def test_the_first_step_of_a_start_says_what_it_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "async_rl.learner.loop.trainer")
    make_run(tmp_path).start()
    found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("training step")]
    assert len(found) == 1
    assert re.fullmatch(r"training step 1: 2 groups, 4 sequences, [1-9]\d* tokens", found[0]), found


def test_a_step_whose_gradient_is_not_finite_leaves_what_it_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    # Five steps of two groups of two answers; all gradients but the first are NaN. Three files are enough.
    run = make_run(tmp_path, experimental={"max_skipped_steps": 9})
    run.engine.stepped = [True, False, False, False, False]
    run.engine.grad_norm = math.nan
    run.start()
    files = sorted((run.path / "nonfinite").iterdir())
    assert [file.name for file in files] == ["step-000002.jsonl", "step-000003.jsonl", "step-000004.jsonl"]
    assert str(files[0]) in caplog.text
    assert "step 2: the optimizer step is skipped: the gradient norm is nan" in caplog.text
    assert "step 1: the optimizer step" not in caplog.text
    head, *lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert (head["step"], head["version"], head["reason"]) == (2, 1, "the gradient norm is nan")
    assert math.isnan(head["grad_norm"])
    assert head["num_sequences"] == len(lines) == 4
    assert [line["position"] for line in lines] == [2, 2, 3, 3]
    trained = run.engine.trained_on[4:8]
    for line, sequence in zip(lines, trained, strict=True):
        assert line["token_ids"] == sequence.token_ids.tolist()
        assert line["advantages"] == sequence.advantages.tolist()
        assert line["behavior_logprobs"] == sequence.behavior_logprobs.tolist()
    assert [line["accuracy"] for line in lines] == [1.0, 0.0, 1.0, 0.0]


def test_an_evaluation_set_that_is_gone_at_a_restart_is_not_awaited(tmp_path: Path):
    run = make_run(tmp_path, data={"eval": {"test": "a.jsonl", "rare": "b.jsonl"}}, learner={"steps": 3})
    run.dies("await_eval", 3)
    retune(run, data={"eval": {"rare": "b.jsonl"}})
    state = run.start()
    assert (state.step, state.pending_evals) == (3, [])
    assert run.queue is not None
    assert {name for name, _, _ in run.queue.asked} == {"rare"}


def test_a_staleness_bound_lowered_at_a_restart_holds_for_the_groups_that_wait(tmp_path: Path):
    run = make_run(tmp_path, queue={"max_staleness": 4}, learner={"steps": 6})
    run.dies("take", 3)
    retune(run, queue={"max_staleness": 0})
    run.start()
    assert run.steps == [1, 2, 3, 4, 5, 6]
    ages = {row["step"]: row["staleness/max"] for row in read_rows(run.path / "metrics.jsonl") if "version" in row}
    assert max(age for step, age in ages.items() if step > 2) == 0


@pytest.mark.parametrize("request_name", ["await_eval", "finish"])
def test_a_learner_killed_after_its_last_step_only_evaluates_again(tmp_path: Path, request_name: str):
    run = make_run(tmp_path)
    run.dies(request_name, 5)
    trained = len(run.engine.versions)
    state = run.start()
    assert len(run.engine.versions) == trained == 5
    assert (run.steps, run.evals, state.step) == ([1, 2, 3, 4, 5], [0, 2, 4, 5], 5)
    assert len(list((run.path / "eval").glob("*.jsonl"))) == 4


def test_an_evaluation_that_a_checkpoint_waits_for_is_asked_again_and_recorded_once(tmp_path: Path):
    # The evaluation of step 2 is asked for just before the checkpoint of step 2, and written after it.
    run = make_run(tmp_path)
    run.dies("ack", 3)
    assert run.evals == [0, 2]
    run.start()
    assert run.queue is not None
    assert run.queue.asked[0] == ("test", 2, False)
    assert (run.steps, run.evals) == ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    assert (run.path / "eval" / "rolled_back-1" / "test-step-000002.jsonl").exists()


def test_a_run_goes_back_to_the_checkpoint_before_a_damaged_one(tmp_path: Path):
    # Killed at step 5 of 7, with checkpoints of steps 2 and 4. The queue, which lives on, goes back to step 2 as well.
    run = make_run(tmp_path, learner={"steps": 7}, eval={"every": 3})
    run.dies("ack", 5)
    (run.path / "checkpoints" / "step-000004" / "extra.msgpack").write_bytes(b"damaged")
    state = run.start()
    assert (run.steps, run.evals, state.step) == ([1, 2, 3, 4, 5, 6, 7], [0, 3, 6, 7], 7)
    rows = read_rows(run.path / "trained.jsonl")
    positions = [position for row in rows for position, _ in row["groups"]]
    assert len(positions) == len(set(positions)) == 14
    assert [row["lineage"] == state.lineage for row in rows] == [False] * 2 + [True] * 5
    ledger = run.queue_state.stats().ledger["groups"]
    assert (ledger["trained"], ledger["in_flight"], ledger["queued"], ledger["taken"]) == (14, 0, 0, 0)
    assert run.dropped["rolled_back"] > 0
    assert (run.path / "checkpoints" / "step-000004.damaged-1").is_dir()


@pytest.mark.parametrize(("num_rows", "request_name"), [(5, "await_eval"), (5, "finish"), (1, "finish")])
def test_a_learner_killed_after_the_data_ended_only_evaluates_again(tmp_path: Path, num_rows: int, request_name: str):
    # Two groups a step, and the last step has one.
    run = make_run(tmp_path, num_rows=num_rows, data={"epochs": 1})
    num_steps = (num_rows + 1) // 2
    run.dies(request_name, num_steps)
    state = run.start()
    assert (state.step, state.exhausted) == (num_steps, True)
    assert run.steps == list(range(1, num_steps + 1))
    assert run.evals == ([0, 2, 3] if num_steps == 3 else [0, 1])
    assert run.dropped == {}


def test_skipped_optimizer_steps_in_a_row_go_on_with_new_groups_and_no_new_version(tmp_path: Path):
    run = make_run(tmp_path, queue={"max_staleness": 0})
    run.engine.stepped = [False, False, False, True, False]
    state = run.start()
    assert (run.steps, state.version, run.weights.published) == ([1, 2, 3, 4, 5], 1, [0, 1])
    assert run.dropped == {"step_skipped": 8}
    assert run.queue_state.stats().ledger["groups"]["trained"] == 2
    written = [row["tokens/trained"] for row in read_rows(run.path / "metrics.jsonl") if "version" in row]
    assert written == [0, 0, 0, 12, 0]


def test_a_step_with_nothing_left_to_train_on_is_skipped(tmp_path: Path):
    def cut_short(lease: Lease, version: int) -> Group:
        return group(lease, version, accuracies=[1.0, 0.0][: lease.group_size], finish_reason="length")

    run = make_run(tmp_path)
    with pytest.raises(RunStoppedError, match="this run has trained nothing"):
        run.start(answer=cut_short)
    assert (run.steps, run.engine.versions) == ([1, 2, 3, 4, 5], [])
    assert run.dropped == {"step_skipped": 10}


def test_a_batch_of_two_updates_may_be_skipped_in_part(tmp_path: Path):
    run = make_run(tmp_path, learner={"steps": 3, "updates_per_batch": 2}, queue={"max_staleness": 2})
    run.engine.stepped = [True, False, False, True, True, True]
    state = run.start()
    # Versions before each update: a step that was skipped leaves the version as it is.
    assert run.engine.versions == [0, 1, 1, 1, 2, 3]
    assert (state.version, run.weights.published) == (4, [0, 1, 2, 4])
    rollouts, tokens = run.queue_state.stats().ledger["rollouts"], run.queue_state.stats().ledger["tokens"]
    # Two groups a step, one an update: two updates were skipped, with two rollouts of three tokens each.
    assert (rollouts["trained"], rollouts["masked"]) == (8, {"step_skipped": 4})
    assert (tokens["trained"], tokens["masked"]) == (24, {"step_skipped": 12})


@pytest.mark.parametrize(("num_steps", "published"), [(5, [0, 2, 4, 5]), (4, [0, 2, 4])])
def test_every_second_version_is_published_and_the_last_one_always(
    tmp_path: Path, num_steps: int, published: list[int]
):
    run = make_run(
        tmp_path, learner={"steps": num_steps}, queue={"max_staleness": 1}, weights={"sync_every": 2}, eval={"every": 1}
    )
    run.start()
    assert run.weights.published == published
    assert sorted(run.evals) == list(range(num_steps + 1))
    last = json.loads((run.path / "eval" / f"test-step-{num_steps:06d}.jsonl").read_text().splitlines()[0])
    assert last["versions"] == [num_steps, num_steps]


@pytest.mark.parametrize("request_name", ["take", "ack"])
def test_an_on_policy_run_with_filter_and_a_death_has_no_deadlock(tmp_path: Path, request_name: str):
    def half_are_too_easy(lease: Lease, version: int) -> Group:
        accuracies = [1.0, float(lease.prompt.position % 2)]
        return group(lease, version, accuracies=accuracies[: lease.group_size])

    run = make_run(tmp_path, queue={"max_staleness": 0})
    with pytest.raises(Killed):
        run.start(killed_in(request_name, 3), half_are_too_easy)
    run.start(answer=half_are_too_easy)
    assert run.steps == [1, 2, 3, 4, 5]
    staleness = [row["staleness/max"] for row in read_rows(run.path / "metrics.jsonl") if "version" in row]
    assert staleness == [0] * 5


def test_groups_in_the_queue_are_trained_after_a_restart_that_lays_the_weights_out_anew(tmp_path: Path):
    # The step of the checkpoint was skipped, so that its version was published before, and groups of it are queued.
    run = make_run(tmp_path, queue={"max_staleness": 2})
    run.engine.stepped = [True, False]
    run.dies("take", 2)
    run.weights.name = "laid-out-anew"

    def sampled_anew(lease: Lease, version: int) -> Group:
        return structs.replace(answered(lease, version), weights_digest={version: f"laid-out-anew-{version}"})

    run.start(answer=sampled_anew)
    assert run.steps == [1, 2, 3, 4, 5]
    assert run.dropped == {"step_skipped": 2}  # nothing beside the scripted one


@pytest.mark.parametrize("digests", [{0: "of other weights"}, {}, {7: "digest-0"}])
def test_groups_of_weights_that_were_not_published_are_refused(tmp_path: Path, digests: dict[int, str]):
    forged: list[str] = []
    tried: set[tuple[str, int, int]] = set()

    def answer(lease: Lease, version: int) -> Group:
        honest = answered(lease, version)
        key = (lease.kind, lease.prompt.position, lease.min_version)
        if key in tried or (lease.kind == "train" and lease.prompt.position):
            return honest
        tried.add(key)
        forged.append(lease.kind)
        return structs.replace(honest, weights_digest=digests)

    run = make_run(tmp_path)
    run.start(answer=answer)
    # The first attempts of evaluations too; later attempts are honest.
    num_evals = forged.count("eval")
    assert (forged.count("train"), num_evals) == (1, len(run.evals) * NUM_EVAL_ROWS)
    entry = run.queue_state.generators.get("g0")
    assert entry is not None
    assert entry.refused == {"weights": 1 + num_evals}
    assert run.queue_state.stats().ledger["rollouts"]["masked"] == {}


def begun_at_version_0(sequence: TokenSequence) -> TokenSequence:
    versions = sequence.versions.copy()
    versions[np.flatnonzero(sequence.loss_mask)[0]] = 0
    return structs.replace(sequence, versions=versions)


def test_of_rollouts_that_outlast_the_staleness_bound_only_old_tokens_are_masked(tmp_path: Path):
    # As the session of an agent that is slow. The learner has forgotten the digest of version 0 by then.
    def slow(lease: Lease, version: int) -> Group:
        found = answered(lease, version)
        if lease.kind == "eval" or version < 4:
            return found
        rollouts = [
            structs.replace(one, sequences=tuple(begun_at_version_0(s) for s in one.sequences))
            for one in found.rollouts
        ]
        return structs.replace(found, rollouts=tuple(rollouts), weights_digest={0: "digest-0", **found.weights_digest})

    run = make_run(tmp_path, queue={"max_staleness": 1}, learner={"steps": 6})
    run.start(answer=slow)
    *_, last = (row for row in read_rows(run.path / "metrics.jsonl") if "version" in row)
    assert last["step"] == 6
    assert {name: number for name, number in last.items() if name.startswith("masked/")} == {}
    assert last["tokens/masked"] == 4  # the first one of each rollout
    assert run.queue_state.stats().ledger["tokens"]["masked"].keys() == {"stale"}


def test_rollouts_of_unknown_weights_that_the_queue_let_pass_are_masked(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(generator_requests, "why_unfit", lambda *args, **kwargs: "")

    def forged(lease: Lease, version: int) -> Group:
        honest = answered(lease, version)
        return honest if lease.kind == "eval" or lease.prompt.position else structs.replace(honest, weights_digest={})

    run = make_run(tmp_path)
    run.start(answer=forged)
    first = next(row for row in read_rows(run.path / "metrics.jsonl") if "version" in row)
    assert first["masked/unknown_weights"] == 2
    assert run.queue_state.stats().ledger["rollouts"]["masked"] == {"unknown_weights": 2}


@pytest.mark.parametrize(
    "sections", [{"learner": {"max_tokens": 5}}, {"learner": {"max_tokens": 1}, "parallel": {"sequence": 5}}]
)
def test_an_answer_longer_than_a_micro_batch_does_not_end_the_run(tmp_path: Path, sections: dict[str, Any]):
    # Two prompt tokens and 3 sampled ones are 5 tokens, as many as a micro-batch holds. One answer has 6.
    def one_too_long(lease: Lease, version: int) -> Group:
        honest = answered(lease, version)
        if lease.kind == "eval" or lease.prompt.position:
            return honest
        (first, _), (_, longer) = honest.rollouts, group(lease, version, tokens=4).rollouts
        return structs.replace(honest, rollouts=(first, longer))

    run = make_run(tmp_path, **sections)
    run.start(answer=one_too_long)
    first, *others = (row for row in read_rows(run.path / "metrics.jsonl") if "version" in row)
    assert (first["masked/too_long"], first["tokens/trained"]) == (1, 9)
    assert [row.get("masked/too_long", 0) for row in others] == [0] * 4
    ledger = run.queue_state.stats().ledger
    assert ledger["rollouts"]["masked"] == {"too_long": 1}
    assert ledger["groups"]["trained"] == 10


def test_a_run_whose_only_generator_invents_logprobs_trains_nothing_and_says_why(tmp_path: Path):
    # The engine gives every token -2, the generator says -0.5: 1.5 nats apart.
    run = make_run(tmp_path)
    with pytest.raises(TrainingError, match=r"every generator is quarantined: g0: .* 1\.5 nats over"):
        run.start(has_parity=True)
    assert run.engine.trained_on == []
    ledger = run.queue_state.stats().ledger
    assert ledger["rollouts"]["masked"] == {}
    assert (ledger["tokens"]["trained"], ledger["groups"]["queued"], ledger["groups"]["in_flight"]) == (0, 0, 0)
    run.queue_state.check()


@pytest.mark.parametrize("fixed_lag", [0, 1, 3])
def test_fixed_lag_holds_the_lag_of_every_token(tmp_path: Path, fixed_lag: int):
    def every_third_is_filtered(lease: Lease, version: int) -> Group:
        accuracies = [1.0, float(lease.prompt.position % 3 == 0)]
        return group(lease, version, accuracies=accuracies[: lease.group_size])

    run = make_run(
        tmp_path,
        learner={"steps": 9, "fixed_lag": fixed_lag},
        queue={"max_staleness": fixed_lag},
        checkpoint={"every": 0},
        eval={"every": 3},
    )
    run.engine.stepped = [True] * 5 + [False]
    state = run.start(answer=every_third_is_filtered)
    # The sixth step is skipped: its version trains again, on a new batch that is as old.
    assert run.engine.versions == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    rows = [row for row in read_rows(run.path / "metrics.jsonl") if "version" in row]
    expected = [min(version, fixed_lag) for version in run.engine.versions]
    assert [row["staleness/mean"] for row in rows] == expected
    assert [row["staleness/max"] for row in rows] == expected
    # The last step publishes what there is: the evaluation after training is wholly of the final version.
    assert run.weights.published[-1] == state.version == 8
    assert run.evals == [0, 3, 6, 9]
    last = json.loads((run.path / "eval" / "test-step-000009.jsonl").read_text().splitlines()[0])
    assert last["versions"] == [8, 8]


def test_fixed_lag_after_a_restart_begins_with_the_version_of_the_checkpoint(tmp_path: Path):
    run = make_run(tmp_path, learner={"steps": 7, "fixed_lag": 2}, queue={"max_staleness": 2}, checkpoint={"every": 3})
    run.dies("ack", 3)
    run.start()
    rows = [row for row in read_rows(run.path / "metrics.jsonl") if "version" in row]
    assert [row["staleness/mean"] for row in rows] == [0, 1, 2, 0, 1, 2, 2]


def test_skipped_steps_in_a_row_past_the_budget_stop_the_run_with_a_diagnosis(tmp_path: Path):
    run = make_run(tmp_path, experimental={"max_skipped_steps": 2}, learner={"steps": 9}, checkpoint={"every": 0})
    run.engine.stepped = [False, False, True, False, False, False]
    with pytest.raises(TrainingError, match=r"3 optimizer steps in a row were skipped, expected at most 2\..*is nan"):
        run.start()
    assert run.steps == [1, 2, 3, 4, 5, 6]


def test_skipped_steps_in_a_row_are_counted_over_a_restart(tmp_path: Path):
    run = make_run(tmp_path, experimental={"max_skipped_steps": 2}, learner={"steps": 9})
    run.engine.stepped = [True, False]
    run.dies("take", 2)
    run.engine.stepped = [False, False]
    with pytest.raises(TrainingError, match="3 optimizer steps in a row were skipped"):
        run.start()
    assert run.steps == [1, 2, 3, 4]


def test_batches_with_nothing_to_train_on_count_as_skipped(tmp_path: Path):
    def cut_short(lease: Lease, version: int) -> Group:
        return group(lease, version, accuracies=[1.0, 0.0][: lease.group_size], finish_reason="length")

    run = make_run(tmp_path, experimental={"max_skipped_steps": 2})
    with pytest.raises(TrainingError, match="every token was masked"):
        run.start(answer=cut_short)
    assert run.steps == [1, 2, 3]


def test_nothing_is_scored_that_the_loss_does_not_use(tmp_path: Path):
    run = make_run(tmp_path)
    run.start()
    assert run.engine.scored == []
    assert {len(s.reference_logprobs) + len(s.proximal_logprobs) for s in run.engine.trained_on} == {0}


def test_the_policy_is_not_asked_for_a_batch_of_one_update(tmp_path: Path):
    run = make_run(tmp_path, loss={"preset": "decoupled_ppo"})
    run.start()
    assert run.engine.scored == []


def test_the_off_policy_baseline_scores_the_policy_once_a_batch_and_sets_no_proximal_policy(tmp_path: Path):
    run = make_run(tmp_path, learner={"steps": 2}, loss={"advantage": "off_policy_optimal"})
    run.start()
    assert run.engine.scored == [("policy", 0), ("policy", 1)]
    assert not any(len(s.proximal_logprobs) for s in run.engine.trained_on)


def test_one_pass_of_the_policy_serves_everything_that_needs_it(tmp_path: Path):
    run = make_run(
        tmp_path,
        learner={"steps": 1, "updates_per_batch": 2},
        loss={
            "preset": "decoupled_ppo", "kl_coef": 0.1, "kl_placement": "reward", "kl_policy": "trained",
            "rules": [{"level": "step", "statistic": "k2", "above": 9.0}],
        },
    )  # fmt: skip
    run.start()
    # Before the first update for the KL, the proximal policy and the rule; before the second one for the rule.
    assert run.engine.scored == [("reference", 0), ("policy", 0), ("policy", 1)]


def test_the_policy_is_asked_before_the_first_update_of_a_batch_and_the_reference_with_it(tmp_path: Path):
    run = make_run(
        tmp_path,
        learner={"steps": 2, "updates_per_batch": 2},
        loss={"preset": "decoupled_ppo", "kl_coef": 0.1, "kl_placement": "loss"},
    )
    run.start()
    # Two updates a batch: both are scored before the first.
    assert sorted(run.engine.scored) == [("policy", 0), ("policy", 2), ("reference", 0), ("reference", 2)]
    assert len(run.engine.trained_on) > 0
    for sequence in run.engine.trained_on:
        np.testing.assert_array_equal(sequence.reference_logprobs, np.where(sequence.loss_mask, -1.0, 0.0))
        np.testing.assert_array_equal(sequence.proximal_logprobs, np.where(sequence.loss_mask, -2.0, 0.0))
