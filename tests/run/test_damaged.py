"""Files of a run with content that nobody wrote are refused by name, and rows of metrics are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import RunError
from async_rl.launch.status import status_of_run, status_tables
from async_rl.run.config_changes import read_changes
from async_rl.run.directory import RunDir
from async_rl.run.lock import acquire
from async_rl.run.queue_files import read_record
from async_rl.run.records.starts import read_origin
from async_rl.run.records.step_log import StepLogTail, read_metrics

DEEP = "[" * 100_000
GROUPS = {"trained": 1, "filtered": 0, "dropped": {"stale": 1}}


@pytest.mark.parametrize("row", [
    {"reward/mean": "x"}, {"reward/mean": [1]}, {"time_s": None}, {"time_s": "1"}, {"reward/mean": float("nan")},
    {"reward/mean": float("inf")}, {"reward/mean": 10**400}, {"reward/mean": True}, {"step": -1}, {"step": 1.5},
])  # fmt: skip
def test_a_row_of_metrics_whose_figures_are_none_is_left_out_and_counted(
    tmp_path: Path, row: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    whole = {"step": 1, "version": 1, "time_s": 0.5, "reward/mean": None}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (whole, whole | row, whole)))
    assert read_metrics(path) == [whole, whole]
    assert f"{path}, line 2: expected a JSON object with a step, got" in caplog.text
    assert list(StepLogTail(path).history) == [whole, whole]


@pytest.mark.parametrize(("ledger", "got"), [
    ([], r"\[\]"), ({"groups": "x"}, "'groups'"), ({"groups": GROUPS | {"dropped": 3}}, "'groups'"),
    ({"groups": {"trained": 1}}, "'groups'"), ({"tokens": {"trained": 1, "masked": [1]}}, "'tokens'"),
    ({"groups": GROUPS | {"trained": float("inf")}}, "'groups'"), ({"eval": 1}, "'eval'"),
    ({"eval": {"rollouts": {"issued": None}}}, "'rollouts'"), ({"outcomes": {"trained": {"groups": 1}}}, "'outcomes'"),
])  # fmt: skip
def test_a_ledger_with_other_counts_is_refused(tmp_path: Path, ledger: Any, got: str):
    run_dir = RunDir(tmp_path)
    run_dir.mark_finished({})
    run_dir.ledger.write_text(json.dumps(ledger))
    with pytest.raises(RunError, match=rf"{run_dir.ledger}, got .*{got}.*delete it"):
        status_of_run(tmp_path, 0.1, None)


def test_a_ledger_with_counts_of_a_newer_version_is_shown(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    run_dir.mark_finished({})
    run_dir.ledger.write_text(json.dumps({"groups": GROUPS | {"waiting": {"tool": 2}, "new": 3}, "other": "x"}))
    assert status_tables(status_of_run(tmp_path, 0.1, None))


@pytest.mark.parametrize(
    "content",
    [DEEP, "x", '{"step": 1, "changed": {"a": 3}}', "[]", "5", '{"step": 1e999, "run_dir": "a", "run_id": "b"}'],
)
def test_small_files_of_a_run_are_refused_by_name_or_only_shown(tmp_path: Path, content: str):
    run_dir = RunDir(tmp_path)
    for path in (run_dir.origin, run_dir.config_changes, run_dir.queue, run_dir.lock):
        path.write_text(f"{content}\n")
    with pytest.raises(RunError, match=r"origin\.json.*remedy"):
        read_origin(run_dir, "a remedy")
    with pytest.raises(RunError, match=r"config_changes\.jsonl.*delete the file"):
        read_changes(run_dir)
    assert read_record(tmp_path) is None
    acquire(run_dir, "learner").close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a\0b"])
def test_a_run_id_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "run_id").write_bytes(content)
    with pytest.raises(RunError, match=r"run_id, got other text.*put it back"):
        _ = RunDir(tmp_path).run_id
