"""Checkpoints that are written while the learner trains: nothing waits for their files but the next checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import RunError, TrainingError
from async_rl.learner.checkpoints.files import latest_checkpoint
from tests.learner.loop.scripted_run import Killed, Run, ScriptedEngine, make_run


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


def slow_run(directory: Path) -> tuple[Run, SlowEngine]:
    checkpoint, skipped = {"every": 2, "asynchronous": True}, {"max_skipped_steps": 1}
    run = make_run(directory, checkpoint=checkpoint, eval={"every": 0}, experimental=skipped)
    run.engine = engine = SlowEngine()
    return run, engine


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
    assert ["time/checkpoint_write_s" in row for row in run.rows] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("request_name", "at_step", "resumed"),
    [
        ("take", 2, 0),  # the files of step 2 are being written
        ("checkpoint_committed", 3, 2),  # they are committed, and the queue does not know
        ("take", 4, 2),  # those of step 4 are being written
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
    assert (run.steps, run.all_positions) == ([1, 2, 3, 4, 5], list(range(10)))
    assert run.ledger["groups"]["trained"] == 10


def test_an_error_in_the_background_ends_the_run_as_one_in_the_foreground_does(tmp_path: Path):
    run, engine = slow_run(tmp_path)
    engine.error = OSError(28, "No space left on device")
    with pytest.raises(RunError, match=r"can't write the checkpoint .*step-000002: .*No space left on device; check"):
        run.start()
    assert latest_checkpoint(run.path) is None


def test_a_run_that_ends_with_another_error_still_completes_its_checkpoint(tmp_path: Path):
    run, engine = slow_run(tmp_path)
    engine.stepped = [True, True, False, False]
    with pytest.raises(TrainingError, match="skipped"):
        run.start()
    assert latest_checkpoint(run.path) == run.path / "checkpoints" / "step-000002"
