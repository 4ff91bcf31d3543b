"""metrics.jsonl: appended, rewound, read with a torn end; wandb offline."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.run.records.metrics import MetricsWriter
from async_rl.run.records.step_log import read_rows
from tests.run.page import markdown


def a_config(directory: Path, **log: Any) -> Config:
    return parse_config({"run": {"dir": str(directory)}, "model": {"path": "tiny"}, "log": log}, "test")


def a_writer(directory: Path) -> MetricsWriter:
    return MetricsWriter(directory, a_config(directory))


def test_a_row_is_on_disk_when_write_returns_in_plain_numbers_or_null(tmp_path: Path):
    a_writer(tmp_path).write({"step": 1, "a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": np.int64(3)})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": 0.5, "d": 3}]


def test_a_torn_last_line_is_not_read_and_is_cut_off_before_the_next_row(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_rows(path) == [{"step": 1}]
    a_writer(tmp_path).write({"step": 2})
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_rewinding_moves_later_rows_aside_and_writing_goes_on(tmp_path: Path):
    writer = a_writer(tmp_path)
    for step in (1, 2, 3):
        writer.write({"step": step})
    assert writer.rewind_to(1) == 2
    writer.write({"step": 2, "again": 1})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "again": 1}]
    assert read_rows(tmp_path / "metrics.rolled_back-1.jsonl") == [{"step": 2}, {"step": 3}]
    assert writer.rewind_to(-1) == 2
    assert len(read_rows(tmp_path / "metrics.rolled_back-2.jsonl")) == 2
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_rewinding_shuts_out_a_writer_that_still_has_the_file_open(tmp_path: Path):
    older = a_writer(tmp_path)
    older.write({"step": 1})
    newer = a_writer(tmp_path)
    assert newer.rewind_to(1) == 0
    older.write({"step": 2})
    newer.write({"step": 2, "is_newer": True})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "is_newer": True}]
    assert not list(tmp_path.glob("*rolled_back*"))


def test_an_evaluation_that_is_asked_for_anew_is_moved_aside_too(tmp_path: Path):
    writer = a_writer(tmp_path)
    for row in ({"step": 2, "version": 2}, {"step": 2, "eval/a/accuracy": 0.5}, {"step": 2, "eval/ab/accuracy": 0.5}):
        writer.write(row)
    assert writer.rewind_to(2, evals_to_come=[("a", 2), ("ab", 1)]) == 1
    assert read_rows(tmp_path / "metrics.rolled_back-1.jsonl") == [{"step": 2, "eval/a/accuracy": 0.5}]
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


def test_the_page_of_all_metrics_is_current():
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == markdown(), "write it again: python -m tests.run.page > docs/metrics.md"
