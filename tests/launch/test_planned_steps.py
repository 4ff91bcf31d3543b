"""How many steps the data allows, and what is said if schedules span more."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.launch.planned_steps import planned_steps, schedule_note
from async_rl.queue.core import persistence
from async_rl.queue.core.prompts import PromptStream
from async_rl.run.directory import RunDir
from tests.config.made import a_config
from tests.queue.builders import ack, group, leases, make_state, put, rows, take


def planned(directory: Path, **sections: dict[str, Any]) -> Config:
    return a_config(directory, learner={"steps": 9, "groups_per_step": 16}, **sections)


@pytest.mark.parametrize(("epochs", "steps"), [(None, 9), (1, 2), (2, 4), (4, 8), (5, 9), (99, 9)])
def test_the_data_or_the_config_ends_the_run(tmp_path: Path, epochs: int | None, steps: int):
    # 30 rows and 16 groups a step: 30, 60, 120 and 150 groups are 2, 4, 8 and 10 steps.
    config = planned(tmp_path, data={} if epochs is None else {"epochs": epochs})
    most_prompts = PromptStream.of_config(config, rows(30)).most_prompts_left
    assert most_prompts == (math.inf if epochs is None else 30 * epochs)
    assert planned_steps(config, most_prompts, RunDir(tmp_path)) == steps


def test_a_fork_counts_from_the_step_of_its_checkpoint(tmp_path: Path):
    (tmp_path / "origin.json").write_text(json.dumps({"run_dir": "r", "run_id": "i", "step": 5}))
    assert planned_steps(planned(tmp_path), 30, RunDir(tmp_path)) == 7


def test_schedules_that_span_more_steps_than_the_data_has_make_a_note(tmp_path: Path):
    config = planned(tmp_path, optimizer={"schedule": "cosine"}, sampling={"temperature_end": 0.5})
    assert schedule_note(config, 2) == (
        "note: the data ends after at most 2 steps (data.epochs), but optimizer.schedule and sampling.temperature_end "
        "span learner.steps = 9, and will not reach the end: set learner.steps = 2"
    )
    assert schedule_note(config, 9) == schedule_note(planned(tmp_path), 2) == ""


def test_status_counts_the_steps_that_the_rest_of_the_data_allows():
    # Seven rows, two groups a step: four steps, and three if two groups are filtered.
    state = make_state(num_rows=7, epochs=1, num_steps=99, max_staleness=9)
    assert (persistence.most_steps(state), persistence.status(state, 0.0)["num_steps"]) == (4, 4)
    for accuracies in ((1.0, 0.0), (0.0, 0.0), (0.0, 0.0), (1.0, 0.0)):
        (lease,) = leases(state, 1)
        put(state, group(lease, accuracies=accuracies))
    assert persistence.most_steps(state) == 3
    take(state)
    assert persistence.most_steps(state) == 3
    ack(state)
    assert persistence.most_steps(state) == 3
    assert persistence.most_steps(make_state(num_steps=99)) == 99
    assert persistence.most_steps(make_state(attached=False)) is None
