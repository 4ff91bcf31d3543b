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
from tests.learner.loop.scripted_run import (
    Killed,
    Run,
    ScriptedEngine,
    killed_in,
    make_run,
)


@dataclass
class CollapsingEngine(ScriptedEngine):
    """Has an effective sample size of 0.01 from version 2 on."""

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        stats = super().update(sequences, version=version)
        return replace(stats, ess=0.01) if version >= 2 else stats


def a_run(tmp_path: Path, *, stops: bool, steps: int = 10) -> Run:
    run = make_run(tmp_path, run={"stop_on_collapse": stops}, learner={"steps": steps}, checkpoint={"every": 3})
    run.engine = CollapsingEngine()
    return run


def noted(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The beginnings of the notes that the learner has logged."""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text[:32] for text in texts if text.startswith("note: ")]


def test_a_collapse_is_logged_once_and_stays_in_status_and_ledger_over_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = a_run(tmp_path, stops=False)
    with pytest.raises(Killed):
        run.start(killed_in("ack", 7))
    # Steps 1 and 2 are good, 3 and 4 are bad.
    assert noted(caplog) == ["note: step 4: the policy has lef"]
    for shown in (persistence.status(run.queue_state, 0.0), persistence.ledger_file(run.queue_state)):
        (note,) = shown["training_notes"]
        assert "effective sample size 1 -> 0.01 within 2 steps" in note
    caplog.clear()
    seen: list[int] = []

    def look(request: str, step: int) -> None:
        if request == "take":
            seen.append(len(persistence.status(run.queue_state, 0.0)["training_notes"]))

    run.start(look)
    assert (noted(caplog), set(seen)) == ([], {1})


def test_a_collapse_stops_the_run_with_a_checkpoint_if_that_is_set_and_so_it_does_after_a_restart(tmp_path: Path):
    run = a_run(tmp_path, stops=True)
    with pytest.raises(CollapseError, match=r"run\.stop_on_collapse: .* \(saved at step 4; .* Lower optimizer\.lr"):
        run.start()
    assert run.steps == [1, 2, 3, 4]
    with pytest.raises(CollapseError, match="saved at step 6"):
        run.start()
    run.engine = ScriptedEngine()  # as after a lower learning rate
    assert run.start().step == 10


def test_a_collapse_at_the_last_step_ends_no_run_that_ends_anyway(tmp_path: Path):
    assert a_run(tmp_path, stops=True, steps=4).start().step == 4


@pytest.mark.parametrize(
    ("data", "received"),
    [
        # Every group has a right and a wrong answer. The first acknowledgement is the beginning.
        ({"shuffle": True}, [None, None, 0.5, 0.5, 0.5]),
        # Prompts of which a step's are no random ones.
        ({"shuffle": False}, [None] * 5),
        ({"shuffle": True, "curriculum": {"solved_at": 1.0}}, [None] * 5),
    ],
)
def test_a_row_has_the_accuracy_of_what_was_received_in_the_step_before_if_its_prompts_are_drawn(
    tmp_path: Path, data: dict[str, Any], received: list[float | None]
):
    run = make_run(tmp_path, data=data)
    run.start()
    assert [row.get("accuracy/received") for row in run.rows] == received
    assert all(row["advantage/agreement"] == 1.0 for row in run.rows)
