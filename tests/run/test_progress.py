"""The lines that a learner logs when nobody else shows its steps."""

from __future__ import annotations

import logging

import pytest

from async_rl.run.progress import StepLines


def test_a_learner_logs_a_line_for_each_step_and_none_for_an_evaluation(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    lines = StepLines(num_steps=10)
    lines.add({"step": 0, "eval/test/accuracy": 0.5})
    row = {"version": 1, "tokens/trained": 9, "reward/mean": 0.25}
    lines.add({**row, "step": 1, "time_s": 2.0, "throughput/generated_tokens_per_s": 7})
    lines.add({**row, "step": 2, "time_s": 4.0})
    # 2 s a step, 8 steps left. Generators report less often: their last figure is on each line.
    assert [record.getMessage() for record in caplog.records] == [
        "step 1/10 | reward 0.25 | generated 7 tok/s",
        "step 2/10 | reward 0.25 | generated 7 tok/s | ETA 16s",
    ]
