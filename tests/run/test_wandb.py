"""Weights & Biases: rows arrive, and a server that is away, hangs, refuses or dies stops and delays no run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import ConfigError
from async_rl.run.logger_process import Limits
from async_rl.run.loggers import Loggers, start_loggers
from tests.run.read_loggers import history
from tests.run.wandb_server import closed_url, wandb_server

pytestmark = pytest.mark.slow  # each test starts wandb once or twice, which takes seconds

SHORT = Limits(server_s=3.0, finish_s=3.0, margin_s=5.0)


@pytest.fixture(autouse=True)
def _account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))


def a_config(directory: Path, mode: str = "online") -> Config:
    log = {"to": ["wandb"], "wandb_mode": mode}
    return parse_config({"run": {"dir": str(directory)}, "model": {"path": "tiny"}, "log": log}, "test")


def started(directory: Path, notes: list[str], *, mode: str = "online", limits: Limits = SHORT) -> Loggers:
    return start_loggers(directory, a_config(directory, mode), name="mine", note=notes.append, limits=limits)


def offline_rows(directory: Path) -> list[dict[str, object]]:
    (file,) = directory.glob("*.wandb")
    return history(file)


def test_rows_reach_a_server_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        log = started(tmp_path, notes, limits=Limits())
        for step in (1, 2, 3):
            log.write({"step": step, "reward/mean": step / 2})
        log.close()
    assert [(row["step"], row["reward/mean"]) for row in server.rows] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert server.names[0] == "mine"
    assert notes == []


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_server_that_does_not_answer_is_replaced_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    notes: list[str] = []
    with wandb_server() as server:
        server.is_silent.set()
        monkeypatch.setenv("WANDB_BASE_URL", server.url if kind == "silent" else closed_url())
        log = started(tmp_path, notes)
        log.write({"step": 1, "reward/mean": 0.5})
        log.close()
    assert len(notes) == 1, notes
    (note,) = notes
    assert "within 3 s" in note
    assert f"wandb sync {log.places['wandb']}" in note
    assert [(row["step"], row["reward/mean"]) for row in offline_rows(Path(log.places["wandb"]))] == [(1, 0.5)]


def test_a_key_that_the_server_refuses_ends_only_a_run_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    notes: list[str] = []
    with wandb_server(status=401) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with pytest.raises(ConfigError, match="401"):
            started(tmp_path, notes)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        log = started(tmp_path, notes)
        log.close()
    (note,) = notes
    assert "401" in note
    assert "wandb sync" in note


def test_a_server_that_dies_delays_no_row_and_the_end_only_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        log = started(tmp_path, notes)
        server.is_silent.set()
        began = time.monotonic()
        for step in range(1, 1001):
            log.write({"step": step, "reward/mean": 0.5})
        assert time.monotonic() - began < 2.0
        log.close()
        assert time.monotonic() - began < 30.0  # 3 s, on a busy machine
    assert len(notes) == 1, notes
    assert f"wandb sync {log.places['wandb']}" in notes[0]
    assert len(offline_rows(Path(log.places["wandb"]))) == 1000


def test_a_wandb_that_dies_or_stands_still_stops_nothing(tmp_path: Path):
    for name, signum, wanted in (("killed", signal.SIGKILL, "has ended"), ("stopped", signal.SIGSTOP, "wandb sync")):
        notes: list[str] = []
        (tmp_path / name).mkdir()
        log = started(tmp_path / name, notes, mode="offline", limits=Limits(finish_s=1.0, margin_s=1.0))
        (child,) = (one for one in psutil.Process().children() if "logger_child" in " ".join(one.cmdline()))
        os.kill(child.pid, signum)
        for step in range(1, 6001):  # more than the pipe and the queue hold
            log.write({"step": step, "text": "x" * 100})
        log.close()
        assert any(wanted in note for note in notes), notes
        assert any("rows are missing in wandb (steps" in note for note in notes), notes
        assert not child.is_running()


def test_no_process_outlives_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        log = started(tmp_path, [])
        (child,) = (one for one in psutil.Process().children() if "logger_child" in " ".join(one.cmdline()))
        processes = [child, *child.children(recursive=True)]
        assert len(processes) > 1  # wandb's service is one of them
        server.is_silent.set()
        log.write({"step": 1})
        log.close()
        assert psutil.wait_procs(processes, timeout=30)[1] == []
