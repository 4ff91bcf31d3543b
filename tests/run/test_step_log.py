"""Files of rows: a damaged line costs its own row, and says so."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.run.directory import RunDir
from async_rl.run.records import step_log
from async_rl.run.records.starts import first_steps
from async_rl.run.records.step_log import StepLog, StepLogTail, newest_metrics, read_rows

DAMAGED = (
    '{"step": 2, "loss": 0.5',
    '{"stfp": 2}',
    "[2]",
    '{"step": true}',
    '{"step": "2"}',
    "[" * 100_000,
    "\x00\ufffd",
)
"""What a row of step 2 may be after a bit has flipped, or a disk has lost a block."""


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_row_is_left_out_said_once_and_moved_aside_by_a_learner_that_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str
):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n{{"step": 4}}\n{{"st')
    for _ in range(2):
        assert [row["step"] for row in read_rows(path)] == [1, 3, 4]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path}, line 2: expected a JSON object with a step, got ")
    assert [row["step"] for row in StepLogTail(path).history] == [1, 3, 4]
    caplog.set_level(logging.INFO)
    with closing(StepLog(path)) as log:
        assert log.rewind_to(3) == 1
        log.write({"step": 4, "again": True})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 3}, {"step": 4, "again": True},
    ]  # fmt: skip
    assert (tmp_path / "metrics.damaged-1.jsonl").read_text() == f"{damaged}\n"
    assert read_rows(tmp_path / "metrics.rolled_back-1.jsonl") == [{"step": 4}]
    assert "moved to metrics.damaged-1.jsonl" in caplog.text


def test_a_start_is_found_beside_a_damaged_row(tmp_path: Path):
    rows = [{"step": 1, "lineage": "a"}, {"step": 2, "linfage": "a"}, {"step": 3, "lineage": "b"}]
    (tmp_path / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert first_steps(RunDir(tmp_path)) == [1, 3]


def test_the_newest_rows_are_those_that_are_whole_at_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "metrics.jsonl"
    assert newest_metrics(path) == []
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4)) + '{"st')  # 12 bytes each
    monkeypatch.setattr(step_log, "_NEWEST_BYTES", 4 + 2 * 12 + 5)
    assert [row["step"] for row in newest_metrics(path)] == [3, 4]
