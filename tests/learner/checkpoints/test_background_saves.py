"""Checkpoints that are written while the learner trains: nothing waits for their files but the next checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import LineageError, RunError, TrainingError
from async_rl.learner.checkpoints.files import latest_checkpoint
from async_rl.run.records.step_log import read_rows
from tests.learner.loop.test_trainer import Killed, Run, ScriptedEngine, make_run


@dataclass
class SlowEngine(ScriptedEngine):
    """Its files are written as soon as the learner waits for them, and no sooner; or they never are (``error``)."""

    error: OSError | None = None
    writing: list[Future[None]] = field(default_factory=list)

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        self.save(directory, extra)
        self.writing.append(Future())
        return self.writing[-1]

    def tick(self) -> None:
        self.end()

    def end(self) -> None:
        while self.writing:
            if self.error is None:
                self.writing.pop().set_result(None)
            else:
                self.writing.pop().set_exception(self.error)


def slow_run(directory: Path, *, max_skipped_steps: int = 10) -> tuple[Run, SlowEngine]:
    run = make_run(
        directory,
        checkpoint={"every": 2, "asynchronous": True},
        eval={"every": 0},
        experimental={"max_skipped_steps": max_skipped_steps},
    )
    run.engine = engine = SlowEngine()
    return run, engine


def trained_positions(run: Run) -> list[int]:
    return [position for row in read_rows(run.path / "trained.jsonl") for position, _ in row["groups"]]


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path):
    run, _ = slow_run(tmp_path)
    committed: list[int] = []

    def note(request: str, step: int) -> None:
        if request == "checkpoint_committed":
            committed.append(step)

    run.start(note)
    # The checkpoint of step 2 is committed when step 4 is trained and not acknowledged, that of 4 likewise after the
    # training of step 5, which is the last and has a checkpoint of its own.
    assert committed == [3, 4, 5]
    assert run.steps == [1, 2, 3, 4, 5]
    rows = [row for row in read_rows(run.path / "metrics.jsonl") if "version" in row]
    assert ["time/checkpoint_write_s" in row for row in rows] == [False, False, False, True, True]
    assert all(row["time/checkpoint_s"] >= 0.0 for row in rows)


@pytest.mark.parametrize(
    ("request_name", "at_step", "resumed"),
    [
        ("take", 2, 0),  # the files of step 2 are being written
        ("ack", 2, 0),
        ("checkpoint_committed", 3, 2),  # they are committed, and the queue does not know
        ("ack", 3, 2),
        ("take", 4, 2),  # those of step 4 are being written
        ("checkpoint_committed", 4, 4),
        ("await_eval", 5, 5),
    ],
)
def test_a_learner_killed_while_a_checkpoint_is_written_repeats_and_loses_nothing(
    tmp_path: Path, request_name: str, at_step: int, resumed: int
):
    run, engine = slow_run(tmp_path)

    def before(request: str, step: int) -> None:
        if (request, step) == (request_name, at_step):
            engine.end()  # the thread ends with the process, and nobody commits
            raise Killed

    with pytest.raises(Killed):
        run.start(before)
    latest = latest_checkpoint(run.path)
    assert (0 if latest is None else int(latest.name[-6:])) == resumed
    run.start()
    assert (run.steps, trained_positions(run)) == ([1, 2, 3, 4, 5], list(range(10)))
    assert run.queue_state.stats().ledger["groups"]["trained"] == 10


def test_an_error_in_the_background_ends_the_run_as_one_in_the_foreground_does(tmp_path: Path):
    run, engine = slow_run(tmp_path)
    engine.error = OSError(28, "No space left on device")
    with pytest.raises(RunError, match=r"can't write the checkpoint .*step-000002: .*No space left on device; check"):
        run.start()
    assert latest_checkpoint(run.path) is None


def test_a_run_that_ends_with_another_error_still_completes_its_checkpoint(tmp_path: Path):
    run, engine = slow_run(tmp_path, max_skipped_steps=1)
    engine.stepped = [True, True, False, False]
    with pytest.raises(TrainingError, match="skipped"):
        run.start()
    latest = latest_checkpoint(run.path)
    assert latest is not None
    assert latest.name == "step-000002"


def test_a_learner_that_was_replaced_commits_nothing(tmp_path: Path):
    run, engine = slow_run(tmp_path)

    def replaced(request: str, step: int) -> None:
        if (request, step) == ("ack", 2):
            engine.end()
            raise LineageError("a newer learner has taken over")

    with pytest.raises(LineageError):
        run.start(replaced)
    assert latest_checkpoint(run.path) is None
