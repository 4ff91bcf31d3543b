"""The tools of ``log.to``: each has the run's rows, also after a resume, and none hurts the run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.config.loading import config_from_toml, config_to_toml, parse_config
from async_rl.errors import ConfigError
from async_rl.run import logger_child, logger_process, logger_tools
from async_rl.run.logger_process import Limits, samples_message
from async_rl.run.loggers import Loggers, check_loggers, start_loggers
from async_rl.run.metrics import MetricsWriter
from tests.run.read_loggers import Rows, mlflow_rows, tensorboard_rows, trackio_rows, wandb_rows
from tests.run.test_metrics import a_config
from tests.run.wandb_server import closed_url

NAMES = ("wandb", "tensorboard", "trackio", "mlflow")


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))


def a_line(step: int, length: int = 10) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"{step}+1="}]
    return {
        "row": 7, "messages": asked, "response": "x" * length, "reward": 0.5, "accuracy": 1.0, "num_tokens": length,
        "finish_reason": "stop",
    }  # fmt: skip


def write_run(directory: Path, **log: Any) -> None:
    """Six steps with an evaluation of an earlier step; then a rollback to step 4, and steps 5 to 8."""
    for rewind, steps in ((-1, range(1, 7)), (4, range(5, 9))):
        writer = MetricsWriter(directory, a_config(directory, **log))
        writer.rewind_to(rewind)
        for step in steps:
            writer.write({"step": step, "reward/mean": step + rewind / 8, "bad": float("nan"), "count": step})
            if step == 5:
                writer.write_samples(step, [a_line(step)] * 40)
        writer.write({"step": steps[0], "eval/odd@name/accuracy": 0.25})
        writer.close()
    assert not (directory / "notes.log").exists()


def check_rows(found: Rows, *, odd: str = "odd@name") -> None:
    """The rows as ``write_run`` writes them, the newer of two rows of a step."""
    for step in range(1, 9):
        # (step - 1 / 8) in the first start, (step + 4 / 8) in the second
        assert found[step]["reward/mean"] == (step - 0.125 if step <= 4 else step + 0.5), step
        assert found[step]["count"] == step
        assert "bad" not in found[step]
        assert found[step].get(f"eval/{odd}/accuracy") == (0.25 if step in (1, 5) else None)
    assert {step for step, row in found.items() if "count" in row} == set(range(1, 9))


def test_tensorboard_has_the_rows_of_a_run_that_was_resumed(tmp_path: Path):
    write_run(tmp_path, to=["tensorboard"])
    found = tensorboard_rows(tmp_path)
    check_rows(found)
    table = found[5]["rollouts"]
    assert len(table) == (1 + 32) * 8  # a header and 32 rows, of 8 cells
    assert table[8:16] == ["5", "7", "user: 5+1=", "x" * 10, "0.5", "1.0", "10", "stop"]
    assert '"path": "tiny"' in found[0]["config"][0]


@pytest.mark.slow
def test_wandb_has_the_rows_of_a_run_that_was_resumed(tmp_path: Path):
    write_run(tmp_path, to=["wandb"], wandb_mode="offline")
    found, ids = wandb_rows(tmp_path)
    check_rows(found)
    assert ids == {(tmp_path / "logger_id").read_text()}
    assert (found[5]["rollouts._type"], found[5]["rollouts.nrows"]) == ("table-file", 32)


@pytest.mark.slow
def test_trackio_has_the_rows_of_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = pytest.importorskip("trackio.sqlite_storage", reason="make test-loggers installs Trackio")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)
    write_run(tmp_path, to=["trackio"])
    found, names = trackio_rows()
    check_rows(found)
    assert names == {f"{tmp_path.name}-{(tmp_path / 'logger_id').read_text()[:6]}"}
    assert len(found[5]["rollouts"]["_value"]) == 32


@pytest.mark.slow
def test_mlflow_has_the_rows_of_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="make test-loggers installs MLflow")
    write_run(tmp_path, to=["mlflow"])
    uri = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    found, run = mlflow_rows(uri)
    check_rows(found, odd="odd_name")
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params["model.path"] == "tiny"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    table = mlflow.MlflowClient(uri).load_table(run.info.experiment_id, "rollouts/step-000005.json")
    assert set(table["row"]) == {7}


@contextmanager
def mlflow_server(directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """``mlflow server`` on a free port of this machine. Yields its address and its process."""
    url = closed_url()
    command = [sys.executable, "-m", "mlflow", "server", "--port", url.rpartition(":")[2], "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/server.db", "--artifacts-destination", str(directory)]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < deadline, (directory / "server.log").read_text()
                assert process.poll() is None, (directory / "server.log").read_text()
                time.sleep(0.2)
        yield url, psutil.Process(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_an_mlflow_server_gets_the_rows_and_may_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow", reason="make test-loggers installs MLflow")
    (tmp_path / "run").mkdir()
    notes: list[str] = []
    with mlflow_server(tmp_path) as (url, _):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        write_run(tmp_path / "run", to=["mlflow"])
        found, run = mlflow_rows(url)
        check_rows(found, odd="odd_name")
        assert run.info.status == "FINISHED"
        log = started(tmp_path / "run", "mlflow", notes)
        assert notes == []
    began = time.monotonic()
    for step in range(9, 12):
        log.write({"step": step, "reward/mean": 0.5})
    assert time.monotonic() - began < 1.0
    log.close()
    assert notes[-1] == "3 rows are missing in mlflow (steps 9 to 11); metrics.jsonl has all rows"


@pytest.mark.slow
def test_an_mlflow_server_that_is_away_at_the_start_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow", reason="make test-loggers installs MLflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", closed_url())
    notes: list[str] = []
    log = started(tmp_path, "mlflow", notes)
    log.write({"step": 1})
    log.close()
    (note,) = notes
    assert note.startswith("mlflow did not start: ")
    assert "goes on without it" in note


class Refusing:
    """A tool that refuses even steps."""

    place = "/there"
    ended: list[bool]

    def __init__(self, settings: Any) -> None:
        self.ended = []

    def write(self, row: Any) -> None:
        if row["step"] % 2 == 0:
            raise RuntimeError(f"no room for {row['step'] // 10}")

    def table(self, step: int, columns: Any, rows: Any) -> None:
        raise RuntimeError("no tables")

    def rewind(self, step: int) -> None: ...

    def finish(self, *, is_failed: bool) -> None:
        self.ended.append(is_failed)


def test_a_tool_that_raises_is_asked_again_and_each_message_is_answered(monkeypatch: pytest.MonkeyPatch):
    tool = Refusing({})
    monkeypatch.setattr(logger_child, "OPENERS", {**logger_tools.OPENERS, "wandb": lambda settings: tool})
    messages = [["row", {"step": step}] for step in (1, 2, 3, 4, 20)] + [["table", [1, [], []]], ["rewind", 1]]
    lines = [["wandb", {"limit_s": 1.0}], *messages, ["end", None]]
    replies = io.StringIO()
    logger_child.serve(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), replies)
    found = [json.loads(line) for line in replies.getvalue().splitlines()][2:]
    refused = {"state": "refused"}
    assert found == [
        True, {**refused, "error": "RuntimeError: no room for 0"}, False, True, False,
        {**refused, "error": "RuntimeError: no room for 2"}, False,
        {**refused, "error": "RuntimeError: no tables"}, False, True,
    ]  # fmt: skip
    assert tool.ended == [False]


def started(directory: Path, name: str, notes: list[str], limits: Limits | None = None) -> Loggers:
    config = a_config(directory, to=[name])
    return start_loggers(directory, config, name="mine", note=notes.append, limits=limits)


def its_process() -> psutil.Process:
    (found,) = (one for one in psutil.Process().children() if "logger_child" in " ".join(one.cmdline()))
    return found


@pytest.mark.parametrize(("signum", "wanted"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "did not send")])
def test_a_tool_that_dies_or_stands_still_stops_nothing_and_the_steps_are_named(
    tmp_path: Path, signum: int, wanted: str
):
    notes: list[str] = []
    log = started(tmp_path, "tensorboard", notes, Limits(finish_s=0.5, margin_s=0.5))
    process = its_process()
    os.kill(process.pid, signum)
    if signum == signal.SIGKILL:
        psutil.wait_procs([process], timeout=20)
    began = time.monotonic()
    for step in range(1, 6001):  # more than the pipe and the queue hold
        log.write({"step": step, "text": "x" * 100})
    assert time.monotonic() - began < 5.0
    log.close()
    assert any(wanted in note for note in notes), notes
    assert notes[-1] == "6000 rows are missing in tensorboard (steps 1 to 6000); metrics.jsonl has all rows"
    assert not process.is_running()


STRAY = """
import json, sys
for number, line in enumerate(iter(sys.stdin.readline, '["end", null]\\n')):
    print({0: '{"state": "started", "place": "here"}', 2: %r}.get(number, "true"), flush=True)
"""


@pytest.mark.parametrize("stray", ["{", "[1]", '{"state": 3}', "\x00", "true\ntrue\ntrue"])
def test_a_tool_that_writes_into_the_pipe_of_its_answers_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stray: str
):
    monkeypatch.setattr(logger_process, "module_command", lambda *_, **__: [sys.executable, "-c", STRAY % stray])
    notes: list[str] = []
    log = started(tmp_path, "tensorboard", notes)
    process = next(one for one in psutil.Process().children() if one.cmdline()[1:2] == ["-c"])
    for step in (1, 2, 3):
        log.write({"step": step})
    log.close()
    assert not process.is_running()
    assert "into the pipe of its answers" in notes[0] or "answers what it was not asked" in notes[0]


def test_rows_that_the_tool_refuses_are_named(tmp_path: Path):
    notes: list[str] = []
    log = started(tmp_path, "tensorboard", notes)
    for step in (1, 2, 3, 2**70):  # TensorBoard's steps have 64 bits
        log.write({"step": step, "reward/mean": 0.5})
    log.close()
    assert "tensorboard did not take a row: ValueError" in notes[0]
    assert notes[1:] == [f"1 rows are missing in tensorboard (steps {2**70}); metrics.jsonl has all rows"]
    assert set(tensorboard_rows(tmp_path)) == {0, 1, 2, 3}


def test_a_tool_that_can_not_start_ends_only_a_run_that_has_not_begun(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("not a folder")
    notes: list[str] = []
    with pytest.raises(ConfigError, match=r'log\.to: tensorboard did not start: .*take "tensorboard" out of log.to'):
        started(tmp_path, "tensorboard", notes)
    assert notes == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    log = started(tmp_path, "tensorboard", notes)
    log.write({"step": 2})
    log.close()
    (note,) = notes
    assert note.startswith("tensorboard did not start: ")
    assert "goes on without it" in note


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mlflow").mkdir()  # a folder that hides nothing
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'async-rl\[mlflow\]'"):
        check_loggers(a_config(tmp_path, to=["mlflow"]))
    check_loggers(a_config(tmp_path, to=[]))


def test_the_older_key_is_refused_in_a_new_config_and_read_in_a_runs(tmp_path: Path):
    old = {"run": {"dir": str(tmp_path)}, "model": {"path": "tiny"}, "log": {"wandb": "offline"}}
    with pytest.raises(ConfigError, match=r'log.wandb: unknown key; set log.to = \["wandb"\] instead'):
        parse_config(old, "test")
    for mode, to in (("off", ()), ("offline", ("wandb",))):
        text = config_to_toml(a_config(tmp_path)).replace("to = []\n", f'wandb = "{mode}"\n')
        assert f'wandb = "{mode}"' in text
        assert config_from_toml(text, "test").log.to == to


def test_a_tool_is_named_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"log\.to: expected each tool once"):
        a_config(tmp_path, to=["wandb", "wandb"])


def test_samples_are_bounded_in_number_and_size():
    step, columns, rows = samples_message(3, [a_line(3, length=5000)] * 100)
    assert (step, len(rows)) == (3, 32)
    cell = rows[0][columns.index("response")]
    assert cell == "x" * 2000 + "... (5000 characters)"
    assert len(json.dumps(rows)) < 32 * 2500
