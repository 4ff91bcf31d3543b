"""The lines that a learner logs when nobody else shows its steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from async_rl.run.figures.progress import StepLines, who_waits


def test_a_learner_logs_a_line_for_each_step_and_none_for_an_evaluation(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    lines = StepLines(num_steps=10)
    lines.add({"step": 0, "eval/test/accuracy": 0.5})
    row = {"version": 1, "tokens/trained": 9, "reward/mean": 0.25}
    lines.add({**row, "step": 1, "time_s": 2.0})
    lines.add({**row, "step": 2, "time_s": 4.0})
    # 2 s a step, 8 steps left.
    _, second = (record.getMessage() for record in caplog.records)
    assert second == "step 2/10 | reward 0.25 | test 0.500 @0 | ETA 16s"


SPARE = "generators have 40% to spare: the learner is the slower side"
WAITS = "the learner is idle 30% of the time and waits for generators"


@pytest.mark.parametrize(
    ("learner", "spare", "others", "sentence"),
    [
        (0.0, 0.4, {"queue/run_ahead_held": 1.0}, f"{SPARE}; 3 of 5 generators would do"),
        (0.0, 0.4, {"queue/run_ahead_held": 1.0, "generators": 1}, SPARE),  # none can be left out
        (0.0, 0.4, {}, SPARE),  # the bound decides
        (0.3, 0.19, {}, f"{WAITS}: more of them make the run faster"),
        (0.3, 0.4, {"idle/grading": 0.6, "idle/leases": 0.3}, f"{WAITS}, which wait 60% for grading"),
        (0.3, 0.4, {}, f"{WAITS}, which have 40% to spare: queue.max_staleness or queue.max_bytes holds them back"),
        (0.3, 0.4, {"queue/run_ahead_held": 1.0}, f"{WAITS}, which have 40% to spare: queue.run_ahead holds them back"),
        (0.08, 0.09, {"queue/run_ahead_held": 1.0}, ""),
        (0.3, 0.4, {"idle/learner_used": 0.5}, ""),  # a rank that trains has no lease
    ],
)
def test_a_sentence_says_who_waits_and_why(learner: float, spare: float, others: dict[str, Any], sentence: str):
    shared = {"version": 1, "tokens/trained": 9, "generators": 5, "time_s": 1.0, **others}
    # A step of 1 s without waits and one of 2 s; the last has no heartbeat of a generator.
    rows = [
        {**shared, "step": 1, "time/step_s": 1.0, "idle/learner": 0.0, "idle/spare": 0.0},
        {**shared, "step": 2, "time/step_s": 2.0, "idle/learner": 1.5 * learner, "idle/spare": 1.5 * spare},
        {**shared, "step": 3, "time/step_s": 0.0, "idle/learner": 0.0},
    ]
    assert who_waits([*rows, {"step": 3, "eval/a/accuracy": 0.5}]) == sentence
    assert who_waits([]) == ""
