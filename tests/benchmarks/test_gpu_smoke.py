"""The program for machines with a GPU: its table and its judgements, as far as a CPU can tell."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.learner.engine.passes import Passes
from async_rl.learner.model import attention
from async_rl.weights import staging
from benchmarks.gpu_smoke import __main__ as program
from benchmarks.gpu_smoke import engine, ranks
from benchmarks.gpu_smoke.case import Case, Machine, NotRunError, Result
from benchmarks.gpu_smoke.cases import CASES
from benchmarks.gpu_smoke.transfer import check_staging


def result_of(case: Case, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(CASES, case.name, case)
    program.run_here(case.name, directory)
    return json.loads((directory / "result.json").read_text())


def fails(machine: Machine) -> str:
    raise AssertionError("expected 1, got 2")


def cannot(machine: Machine) -> str:
    raise NotRunError("needs a larger device")


@pytest.mark.parametrize(
    ("check", "outcome", "detail"),
    [
        (lambda machine: "3 of 3", "passed", "3 of 3"),
        (fails, "FAILED", "AssertionError: expected 1, got 2"),
        (cannot, "not run", "needs a larger device"),
    ],
)
def test_what_a_case_returns_or_raises_is_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Any, outcome: str, detail: str
):
    result = result_of(Case("one", check), tmp_path, monkeypatch)
    assert (result["name"], result["outcome"], result["detail"]) == ("one", outcome, detail)


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


@pytest.mark.parametrize(
    ("inherited", "has_cuda", "threads"),
    [({}, False, "1"), ({"OMP_NUM_THREADS": "4"}, False, "4"), ({}, True, None)],
)
def test_without_a_gpu_processes_of_cases_have_one_thread(
    inherited: dict[str, str], has_cuda: bool, threads: str | None
):
    environment = program.environment_of_cases({"HOME": "/root", **inherited}, has_cuda=has_cuda)
    assert (environment["HOME"], environment.get("OMP_NUM_THREADS")) == ("/root", threads)


def test_the_option_that_needs_a_compiler_is_not_run_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRunError, match=r"learner\.compile: expected a C.* compiler"):
        engine.check_option("compiled", Machine(torch.device("cpu"), tmp_path))


def test_the_table_has_a_row_for_each_case_and_the_exit_code_counts_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert program.main(["--only", "staging", "nccl-pair", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
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


@pytest.mark.parametrize(
    ("ending", "cause"),
    [("kill -SEGV $$", "ended with exit code -11"), ("sleep 1000", "did not end within 60 s")],
)
def test_a_case_that_crashes_or_hangs_after_its_result_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, cause: str
):
    result, script, right = tmp_path / "result.json", tmp_path / "script", subprocess.Popen.wait
    result.write_text(json.dumps(asdict(Result("staging", "passed", "all bytes right", 1.0, 5))))
    # Its arguments are -m benchmarks.gpu_smoke --here NAME --directory DIRECTORY.
    script.write_text(f"#!/bin/sh\nmv {result} $6/result.json\n{ending}\n")
    script.chmod(0o700)

    def wait(process: Any, timeout: float | None = None) -> int:
        if timeout is None or "sleep" not in ending:
            return right(process, timeout)
        while result.exists():  # the 60 s are over as soon as the script hangs
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("script", timeout)

    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    found = program.run_apart("staging", 60, tmp_path / "staging")
    assert (found["outcome"], found["detail"]) == ("FAILED", f"all bytes right; but it {cause}")
    assert found["device_bytes"] == 5


def test_a_directory_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "staging").mkdir()
    with pytest.raises(SystemExit):
        program.main(["--only", "staging", "--directory", str(tmp_path)])
    assert f"--directory: expected a new or an empty directory, got {tmp_path}, which has" in capsys.readouterr().err


@pytest.fixture(params=["", "setsid "])
def left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[int]:
    """Replace the process of a case by one that starts another, maybe in a session of its own, and ends with 3.

    Return a file descriptor from which "x" can be read when both run, and the end of the file when both have ended.
    """
    pipe, script = tmp_path / "pipe", tmp_path / "script"
    os.mkfifo(pipe)
    started = (
        f"{request.param}sh -c 'touch {tmp_path}/runs; exec sleep 1000' &\nuntil [ -e {tmp_path}/runs ]; do :; done"
    )
    script.write_text(f"#!/bin/sh\nexec 5> {pipe}\n{started}\necho x >&5\nexit 3\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    yield reader
    os.close(reader)


def rest_of(reader: int) -> bytes:
    """Read until all processes that can write have ended, for at most 10 s."""
    found = b""
    while select.select([reader], [], [], 10.0)[0]:
        if not (part := os.read(reader, 100)):
            return found
        found += part
    raise AssertionError("expected the processes of the case to be killed, but one still runs")


def test_processes_that_a_case_leaves_behind_are_killed(tmp_path: Path, left_behind: int):
    result = program.run_apart("staging", 60, tmp_path / "staging")
    assert (result["outcome"], result["detail"]) == ("FAILED", "ended with exit code 3")
    assert rest_of(left_behind) == b"x\n"


def test_an_interrupt_kills_the_processes_and_still_prints_the_counts(
    tmp_path: Path, left_behind: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    right = subprocess.Popen.wait

    def interrupted(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return right(process)
        assert select.select([left_behind], [], [], 10.0)[0], "expected the processes to start"
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    assert program.main(["--only", "staging", "--directory", str(tmp_path / "logs")]) == 130
    assert rest_of(left_behind) == b"x\n"
    out, err = capsys.readouterr()
    assert "0 passed, 0 FAILED, 0 not run" in out
    assert err == "interrupted; the processes of the case that ran are killed\n"


def test_a_terminal_shows_which_case_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CASES, "staging", replace(CASES["staging"], num_devices=99))
    monkeypatch.setenv("TERM", "xterm")
    user, terminal = pty.openpty()
    with os.fdopen(user, "rb", buffering=0) as screen, os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert program.main(["--only", "staging", "--directory", str(tmp_path)]) == 0
        assert b"staging, case 1 of 1, at most 120 s" in screen.read(10_000)


def test_missing_packages_are_named_with_the_python_that_lacks_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(program, "_version", lambda package: None if package in ("zstandard", "peft") else "1")
    assert program.main([]) == 2
    assert f"{sys.executable} lacks peft, zstandard; install them" in capsys.readouterr().err


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        program.main(["--only", "attentoin"])
    assert "expected cases of attention, head-gradient" in capsys.readouterr().err


def test_a_pattern_chooses_cases_in_order_with_what_must_run_before():
    names = program.chosen(["run-t*", "attention"])
    assert names == ["attention", "warm-start", "run-tcp", "run-two-ranks", "run-torchrun"]


def test_staging_that_copies_too_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging, "_fill", lambda *call: None)
    with pytest.raises(AssertionError, match=r"version 0: layer\.0 was changed later"):
        check_staging(Machine(torch.device("cpu"), tmp_path))


SHORT = ("attention", "head-gradient", "engine-lora", "engine-sampling-masks", "engine-experts", "no-sync", "version")
"""The others are no different on a CPU, or take minutes."""


def test_the_settings_of_every_option_are_a_config(tmp_path: Path):
    machine = Machine(torch.device("cpu"), tmp_path)
    for sections in engine.OPTIONS.values():
        engine.config_of(machine, tmp_path / "model", "float32", sections)
    for parallel in ranks.LAYOUTS.values():
        engine.config_of(machine, tmp_path / "model", "float32", {"parallel": parallel})


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SHORT)
def test_a_case_of_one_process_passes_on_a_cpu(tmp_path: Path, name: str):
    program.run_here(name, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["outcome"] == "passed", result["detail"]


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.scaled_dot_product_attention

    def wrong(*tensors: Any, scale: float, **how: Any) -> torch.Tensor:
        return right(*tensors, scale=1.01 * scale, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", wrong)


def skipped_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_digest", lambda *of: "0" * 32)


def wait_in_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Passes._forward

    def waiting(*arguments: Any) -> Any:
        output: Any = right(*arguments)
        assert math.isfinite(output.loss_sum.item())
        return output

    monkeypatch.setattr(Passes, "_forward", waiting)


def forgotten_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Passes.begin_backward

    def forgetting(passes: Passes, index: int, num_micro_batches: int) -> None:
        for parameter in passes._policy.parameters():
            parameter.grad = None
        right(passes, index, num_micro_batches)

    monkeypatch.setattr(Passes, "begin_backward", forgetting)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("break_it", "name", "detail"),
    [
        (wrong_scale, "attention", "expected errors below"),
        (skipped_digest, "staging", "expected the digests of its bytes"),
        (wait_in_a_micro_batch, "no-sync", "expected at most 0 waits with 1 chunks"),
        (forgotten_micro_batches, "engine-small-micro-batches", "expected an error of the gradient below"),
    ],
)
def test_a_broken_build_fails_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Any, name: str, detail: str
):
    break_it(monkeypatch)
    program.run_here(name, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["outcome"], detail in result["detail"]) == ("FAILED", True), result["detail"]


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
