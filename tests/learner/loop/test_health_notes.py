"""The learner says that its training goes wrong: in its log, in the queue's status, and by its end if wanted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import CollapseError
from async_rl.learner.interface import UpdateStats
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.core import persistence
from async_rl.records import Group, Lease
from async_rl.run.records.step_log import read_rows
from tests.learner.loop.test_trainer import Killed, Run, ScriptedEngine, killed_in, make_run, retune
from tests.queue.builders import group


@dataclass
class CollapsingEngine(ScriptedEngine):
    """Has an effective sample size of 0.01 from the version after ``collapses_after`` on."""

    collapses_after: int = 2

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        stats = super().update(sequences, version=version)
        return replace(stats, ess=0.01) if version >= self.collapses_after else stats


def a_run(tmp_path: Path, *, stops: bool, steps: int = 10) -> Run:
    run = make_run(tmp_path, run={"stop_on_collapse": stops}, learner={"steps": steps}, checkpoint={"every": 3})
    run.engine = CollapsingEngine()
    return run


def noted(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The beginnings of the notes that the learner has logged."""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text[:60] for text in texts if text.startswith("note: ")]


NOTE = "note: step 4: the policy has left the samples that it trains"


def test_a_collapse_is_logged_once_and_is_in_status_and_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = a_run(tmp_path, stops=False)
    run.start()
    # Steps 1 and 2 are good, 3 and 4 are bad.
    assert noted(caplog) == [NOTE]
    for shown in (persistence.status(run.queue_state, 0.0), persistence.ledger_file(run.queue_state)):
        (note,) = shown["training_notes"]
        assert "effective sample size 1 -> 0.01 within 2 steps" in note


def test_a_resumed_learner_repeats_no_note_and_status_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = a_run(tmp_path, stops=False)
    with pytest.raises(Killed):
        run.start(killed_in("ack", 7))
    assert noted(caplog) == [NOTE]
    caplog.clear()
    seen: list[int] = []

    def look(request: str, step: int) -> None:
        if request == "take":
            seen.append(len(persistence.status(run.queue_state, 0.0)["training_notes"]))

    run.start(look)
    assert noted(caplog) == []
    assert set(seen) == {1}


def test_a_collapse_stops_the_run_with_a_checkpoint_if_that_is_set(tmp_path: Path):
    run = a_run(tmp_path, stops=True)
    with pytest.raises(CollapseError) as caught:
        run.start()
    said = str(caught.value)
    assert said.startswith("run.stop_on_collapse: the policy has left the samples that it trains on: ")
    saved = "at step 4 (saved at step 4; the same command resumes from step-000004). Lower optimizer.lr"
    assert saved in said
    assert run.steps == [1, 2, 3, 4]


def test_a_resumed_run_stops_again_only_if_its_own_steps_show_a_collapse(tmp_path: Path):
    run = a_run(tmp_path, stops=True)
    with pytest.raises(CollapseError):
        run.start()
    with pytest.raises(CollapseError, match="saved at step 6"):
        run.start()
    run.engine = ScriptedEngine()  # as after a lower learning rate
    assert run.start().step == 10


def test_a_collapse_at_the_last_step_ends_no_run_that_ends_anyway(tmp_path: Path):
    run = a_run(tmp_path, stops=True, steps=4)
    assert run.start().step == 4


def test_a_stopped_run_goes_on_if_the_key_is_switched_off(tmp_path: Path):
    run = a_run(tmp_path, stops=True)
    with pytest.raises(CollapseError):
        run.start()
    retune(run, run={"stop_on_collapse": False})
    assert run.start().step == 10


def test_a_row_has_the_accuracy_of_what_was_received_in_the_step_before(tmp_path: Path):
    run = make_run(tmp_path, data={"shuffle": True})
    run.start()
    rows = [row for row in read_rows(run.path / "metrics.jsonl") if "version" in row]
    # Every group has a right and a wrong answer. The first acknowledgement is the beginning.
    assert [row.get("accuracy/received") for row in rows] == [None, None, 0.5, 0.5, 0.5]
    assert all(row["advantage/agreement"] == 1.0 for row in rows)


@pytest.mark.parametrize("data", [{"shuffle": False}, {"shuffle": True, "curriculum": {"solved_at": 1.0}}])
def test_steps_whose_prompts_are_no_random_ones_have_no_such_accuracy(tmp_path: Path, data: dict[str, Any]):
    run = make_run(tmp_path, data=data)
    run.start()
    assert not any("accuracy/received" in row for row in read_rows(run.path / "metrics.jsonl"))


def test_an_evaluation_that_is_much_worse_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = make_run(tmp_path)

    def answer(lease: Lease, version: int) -> Group:
        right = lease.kind != "eval" or version < 2
        return group(lease, version, accuracies=[float(right), 0.0][: lease.group_size])

    run.start(answer=answer)
    # All right at step 0, none at step 2: there is no error in that.
    assert noted(caplog) == ["note: step 2: the answers have become worse: accuracy 100 % "]
    assert len(persistence.status(run.queue_state, 0.0)["training_notes"]) == 1
