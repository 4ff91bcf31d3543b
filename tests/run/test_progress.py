"""The lines that a learner logs when nobody else shows its steps."""

from __future__ import annotations

import logging

import pytest

from async_rl.run.progress import StepLines


def test_a_learner_logs_a_line_for_each_step_and_none_for_an_evaluation(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    lines = StepLines(num_steps=10)
    lines.add({"step": 0, "eval/test/accuracy": 0.5})
    for step in (1, 2):
        lines.add({"step": step, "version": step, "tokens/trained": 9, "time_s": 2.0 * step, "reward/mean": 0.25})
    # 2 s a step, 8 steps left.
    assert [record.getMessage() for record in caplog.records] == [
        "step 1/10 | reward 0.25",
        "step 2/10 | reward 0.25 | ETA 16s",
    ]
