"""The program for machines with a GPU: its table and its judgements, as far as a CPU can tell."""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.run.records.token_columns import TokenTable, write_token_columns
from benchmarks import baselines
from benchmarks.gpu_smoke import __main__ as program
from benchmarks.gpu_smoke.case import Case, Machine, Result
from benchmarks.gpu_smoke.cases import CASES
from benchmarks.gpu_smoke.runs import mismatch_of


def result_of(name: str, directory: Path) -> dict[str, Any]:
    program.run_here(name, directory)
    return json.loads((directory / "result.json").read_text())


def fails(machine: Machine) -> str:
    raise AssertionError("expected 1, got 2")


@pytest.mark.parametrize(
    ("needs", "detail"),
    [
        ({"num_devices": 99}, f"needs CUDA devices: 99, and there are {torch.cuda.device_count()}"),
        ({"package": "a_package_that_nobody_wrote"}, "needs the package a_package_that_nobody_wrote, which is not"),
    ],
)
def test_no_process_is_started_for_a_case_that_needs_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: dict[str, Any], detail: str
):
    monkeypatch.setitem(CASES, "one", replace(Case("one", fails), **needs))
    result = program.run_apart("one", 60, tmp_path / "one")
    assert result["outcome"] == "not run"
    assert str(result["detail"]).startswith(detail)
    assert not (tmp_path / "one").exists()


def test_the_table_has_a_row_for_each_case_the_exit_code_counts_failures_and_a_file_has_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert program.main(["--only", "staging", "nccl-pair", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    (baseline,) = tmp_path.glob("*.json")
    assert baselines.read(baseline)["versions"]["torch"] == version("torch")
    assert f"figures: {baseline}; compare: " in out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["case", "staging", "nccl-pair"]
    assert rows[1][1] == "passed"
    assert all(len(row) == 5 for row in rows)
    if torch.cuda.device_count() < 2:
        assert rows[2][1] == "not run"
        assert "1 passed, 0 FAILED, 1 not run" in out
    if not torch.cuda.is_available():
        assert "torch computes with 1 thread(s)" in (tmp_path / "staging" / "log.txt").read_text()


def test_a_case_that_ends_too_late_has_failed_and_the_end_of_its_log_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(CASES, "staging", replace(CASES["staging"], deadline_s=0.0))
    assert program.main(["--only", "staging", "--directory", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "| staging | FAILED | 0 s |  | did not end within 0 s |" in out
    assert "staging failed; the end of" in out


def test_a_case_that_crashes_after_its_result_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result, script = tmp_path / "result.json", tmp_path / "script"
    result.write_text(json.dumps(asdict(Result("staging", "passed", "all bytes right", 1.0, 5))))
    # Its arguments are -m benchmarks.gpu_smoke --here NAME --directory DIRECTORY.
    script.write_text(f"#!/bin/sh\nmv {result} $6/result.json\nkill -SEGV $$\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    found = program.run_apart("staging", 60, tmp_path / "staging")
    assert (found["outcome"], found["detail"]) == ("FAILED", "all bytes right; but it ended with exit code -11")


@pytest.mark.parametrize("session", ["", "setsid "])
def test_processes_that_a_case_leaves_behind_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: str):
    # The case starts another process, maybe in a session of its own, and ends. Both hold the pipe's end to write.
    pipe, script, runs = tmp_path / "pipe", tmp_path / "script", tmp_path / "runs"
    os.mkfifo(pipe)
    started = f"{session}sh -c 'touch {runs}; exec sleep 1000' &\nuntil [ -e {runs} ]; do :; done"
    script.write_text(f"#!/bin/sh\nexec 5> {pipe}\n{started}\necho x >&5\nexit 3\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        result = program.run_apart("staging", 60, tmp_path / "staging")
        assert (result["outcome"], result["detail"]) == ("FAILED", "ended with exit code 3")
        for expected in (b"x\n", b""):  # and the end of the file: nobody holds the other end
            assert select.select([reader], [], [], 10.0)[0]
            assert os.read(reader.fileno(), 100) == expected


SHORT = ("attention", "head-gradient", "engine-lora", "engine-sampling-masks", "engine-experts", "version")
"""The others are no different on a CPU, or take minutes."""


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SHORT)
def test_a_case_of_one_process_passes_on_a_cpu(tmp_path: Path, name: str):
    result = result_of(name, tmp_path)
    assert result["outcome"] == "passed", result["detail"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_a_case_passes_on_this_machine(tmp_path: Path, name: str):
    if CASES[name].after:
        program.run_apart(CASES[name].after, 300, tmp_path / "before")
    result = program.run_apart(name, CASES[name].deadline_s, tmp_path / name)
    if result["outcome"] == "not run":
        pytest.skip(str(result["detail"]))
    assert result["outcome"] == "passed", Result(**result)  # pyright: ignore[reportArgumentType]


def test_engine_and_learner_are_compared_by_answers_that_no_update_met(tmp_path: Path):
    """Context, then answers of version 3; of 2 and 3; and of 2. The learner has 3."""
    versions = np.array([-1, 3, 3, -1, 2, 3, -1, 2, 2], np.int32)
    behavior = np.array([np.nan, -1, -2, np.nan, -1, -2, np.nan, -1, -2], np.float32)
    logprobs = np.array([np.nan, -1.001, -1.997, np.nan, -3, -4, np.nan, -5, -6], np.float32)
    numbers = {"token_ids": versions, "versions": versions, "behavior_logprobs": behavior, "logprobs": logprobs}
    table = TokenTable(
        {"position": np.arange(3), "index": np.zeros(3), "sequence": np.zeros(3), "learner_version": np.full(3, 3)},
        np.full(3, 3), numbers | {"entropies": logprobs, "advantages": logprobs}, ["a"] * 9, ["trained"] * 9,
    )  # fmt: skip
    write_token_columns(tmp_path / "rollouts" / "step-000001.tokens.parquet", table)
    assert mismatch_of(tmp_path) == pytest.approx(0.002, abs=1e-6)
