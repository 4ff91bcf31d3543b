"""A learner that a signal asks to stop saves its last step; the next start trains every group once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import StoppedError
from async_rl.learner.checkpoints.files import latest_checkpoint
from tests.learner.loop.scripted_run import Run, make_run

NUM_STEPS = 5


class Signal:
    """SIGTERM arrives right before the request ``wanted`` of the learner at ``at_step``."""

    def __init__(self, wanted: str = "", at_step: int = -1) -> None:
        self._place, self.signum = (wanted, at_step), 0

    def before(self, request: str, step: int) -> None:
        if (request, step) == self._place:
            self.signum = signal.SIGTERM


def stopped(run: Run, came: Signal) -> str:
    """Why this start ended."""
    with pytest.raises(StoppedError) as stopping:
        run.start(came.before, stop_signal=lambda: came.signum)
    return str(stopping.value)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize(
    ("wanted", "at_step", "saved"),
    [
        ("await_eval", 0, "none"),
        ("take", 0, "none"),
        ("take", 1, "step-000001"),
        ("take", 3, "step-000003"),
        ("ack", 0, "step-000001"),
        ("ack", 2, "step-000003"),
        ("ack", 4, "step-000005"),
        ("checkpoint_committed", 5, "step-000005"),
        ("await_eval", 5, "step-000005"),
    ],
)
def test_a_stopped_learner_loses_no_trained_step_and_trains_nothing_twice(
    tmp_path: Path, wanted: str, at_step: int, saved: str, every: int, asynchronous: bool
):
    run = make_run(tmp_path, checkpoint={"every": every, "asynchronous": asynchronous})
    why = stopped(run, Signal(wanted, at_step))
    checkpoint = latest_checkpoint(run.path)
    assert saved == ("none" if checkpoint is None else checkpoint.name)
    assert ("starts over" if saved == "none" else f"resumes from {saved}") in why
    state = run.start()
    assert (state.step, run.steps) == (NUM_STEPS, list(range(1, NUM_STEPS + 1)))
    assert run.evals == [0, 2, 4, 5]
    # Two groups a step, in the order of the stream. No optimizer step was made in vain.
    assert run.all_positions == list(range(2 * NUM_STEPS))
    assert len(run.engine.calls) == NUM_STEPS
    assert run.ledger["groups"]["trained"] == 2 * NUM_STEPS


def test_a_step_of_several_updates_is_finished_once_it_has_begun(tmp_path: Path):
    # Two updates a batch: the signal comes with the first of the second step's.
    run = make_run(tmp_path, learner={"steps": 3, "updates_per_batch": 2}, queue={"max_staleness": 2})
    came = Signal()
    update: Callable[..., object] = run.engine.update

    def update_and_signal(*arguments: Any, version: int) -> object:
        if version == 2:
            came.signum = signal.SIGTERM
        return update(*arguments, version=version)

    run.engine.update = update_and_signal  # pyright: ignore[reportAttributeAccessIssue]
    assert "saved at step 2;" in stopped(run, came)
    assert run.engine.versions == [0, 1, 2, 3]
    assert run.weights.published == [0, 2]  # a restart publishes the last version


def test_a_stop_while_a_staging_buffer_is_awaited_leaves_the_step_recorded(tmp_path: Path):
    run = make_run(tmp_path, checkpoint={"every": 0})
    came, publish = Signal(), run.weights.publish

    def wait_for_a_buffer(lineage: str, version: int, *arguments: object, **options: object) -> object:
        if version == 2:
            came.signum = signal.SIGTERM
            options["tick"]()  # pyright: ignore[reportCallIssue]
        return publish(lineage, version, *arguments, **options)  # pyright: ignore[reportArgumentType]

    run.weights.publish = wait_for_a_buffer  # pyright: ignore[reportAttributeAccessIssue]
    assert "saved at step 2;" in stopped(run, came)
    assert (run.steps, run.weights.published) == ([1, 2], [0, 1])
