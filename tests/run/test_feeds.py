"""What feeds the sinks of ``log.to``: each gets every row once, also after a resume, and none hurts the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.cli.main import main
from async_rl.config.loading import config_to_toml
from async_rl.errors import ConfigError
from async_rl.run.directory import RunDir
from async_rl.run.following import feeds
from async_rl.run.following.feeds import Sinks
from async_rl.run.following.follower import followed
from async_rl.run.following.sinks import Sink, check_sinks, samples_table
from async_rl.run.lock import acquire
from async_rl.run.records.metrics import MetricsWriter
from async_rl.run.records.step_log import StepLog, read_rows
from tests.end_to_end.harness import wait_until
from tests.packages import install
from tests.run.test_metrics import a_config


def a_line(step: int, length: int = 10) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"{step}+1="}]
    return {
        "row": 7, "messages": asked, "response": "x" * length, "reward": 0.5, "accuracy": 1.0, "num_tokens": length,
        "finish_reason": "stop",
    }  # fmt: skip


def started(directory: Path, notes: list[str], *to: str, refuses: bool = False, **log: Any) -> Sinks:
    config = a_config(directory, to=list(to), **log)
    return Sinks(config, RunDir(directory), notes.append, refuses=refuses, stats_pid=os.getpid())


def write_rows(directory: Path, *steps: int) -> None:
    """Append rows to ``metrics.jsonl``."""
    with closing(StepLog(directory / "metrics.jsonl")) as log:
        for step in steps:
            log.write({"step": step, "reward/mean": 0.5})


class Recorder(Sink):
    """A sink of this test. Its server answers if ``is_there``, and it refuses the steps in ``refused``."""

    place = "/there"

    def __init__(self, settings: Any) -> None:
        self.calls: list[Any] = []
        self.is_there, self.refused = threading.Event(), set[int]()
        self.is_there.set()

    def write(self, row: Any) -> None:
        if not self.is_there.is_set():
            raise ConnectionError("no route")
        if row["step"] in self.refused:
            raise ValueError("no room")
        self.calls.append(row["step"])

    def rewind(self, step: int) -> None:
        self.calls.append(f"rewind {step}")

    def finish(self, *, is_failed: bool) -> None:
        self.calls.append("failed" if is_failed else "finished")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The sink ``own``, whose state a restart does not touch."""
    sink = Recorder({})
    monkeypatch.setattr(feeds, "sink_factory", lambda name: lambda settings: sink)
    monkeypatch.setattr(feeds, "LOOK_S", 0.01)
    return sink


def test_a_restart_neither_loses_nor_doubles_rows_and_a_rollback_is_told(tmp_path: Path, recorder: Recorder):
    notes: list[str] = []
    write_rows(tmp_path, 1, 2)
    assert started(tmp_path, notes, "own").finish(is_failed=False)
    write_rows(tmp_path, 3, 4)  # while nobody follows
    with closing(MetricsWriter(tmp_path, a_config(tmp_path))) as writer:
        writer.rewind_to(1)
        for step in (2, 3):
            writer.write({"step": step, "reward/mean": 0.75})
        writer.write({"step": 1, "eval/a/accuracy": 1.0})
    assert started(tmp_path, notes, "own").finish(is_failed=True)
    assert recorder.calls == [1, 2, "finished", "rewind 1", 2, 3, 1, "failed"]
    (tmp_path / "follow" / "own.jsonl").write_text((tmp_path / "follow" / "own.jsonl").read_text()[:-9])
    assert started(tmp_path, notes, "own").finish(is_failed=False)  # it was killed before the last line was complete
    assert recorder.calls[-2:] == [1, "finished"]
    assert notes == []


def test_rows_wait_for_a_server_that_is_away_and_what_is_refused_is_named_and_sent_later(
    tmp_path: Path, recorder: Recorder
):
    notes: list[str] = []
    recorder.refused = {2}
    recorder.is_there.clear()
    write_rows(tmp_path, 1, 2, 3)
    sinks = started(tmp_path, notes, "own")
    wait_until("the note", lambda: notes)
    recorder.is_there.set()
    assert not sinks.finish(is_failed=False)
    assert recorder.calls == [1, 3, "finished"]
    assert [note.partition(";")[0] for note in notes] == [
        "own fails: ConnectionError: no route", "own did not take a row: ValueError: no room",
        "1 rows are missing in own (steps 2)",
    ]  # fmt: skip
    assert f"async-rl follow {tmp_path} sends what is left" in notes[-1]
    recorder.refused.clear()
    assert started(tmp_path, notes, "own").finish(is_failed=False)
    assert recorder.calls == [1, 3, "finished", 2, "finished"]


def test_a_sink_that_hangs_delays_no_other_and_the_end_only_a_little(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    hang, notes = threading.Event(), list[str]()

    class Hanging(Recorder):
        def write(self, row: Any) -> None:
            assert hang.wait(30)

    other = Hanging({})
    monkeypatch.setattr(feeds, "sink_factory", lambda name: lambda settings: other if name == "hangs" else recorder)
    monkeypatch.setattr(feeds, "FINISH_S", 0.25)
    monkeypatch.setattr(feeds, "MARGIN_S", 0.25)
    sinks = started(tmp_path, notes, "hangs", "own")
    write_rows(tmp_path, 1)
    wait_until("the row", lambda: recorder.calls == [1])
    assert not sinks.finish(is_failed=False)
    hang.set()
    assert recorder.calls == [1, "finished"]
    assert notes[0].startswith("hangs did not send everything within 0.25 s at the end of the run")
    assert notes[1].startswith("1 rows are missing in hangs (steps 1); ")


def test_a_follower_that_is_killed_is_started_again_and_a_failed_run_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    offer_sink(tmp_path / "site", monkeypatch)
    monkeypatch.setattr("async_rl.run.following.follower._RESTART_S", 0.1)
    run, said = RunDir(tmp_path / "run"), list[str]()
    run.path.mkdir()
    config = a_config(run.path, to=["csv"])
    run.config.write_text(config_to_toml(config))

    def fail() -> None:
        for step in (1, 2):
            write_rows(run.path, step)
            wait_until("the row", lambda step=step: len(read_rows(run.follow / "csv.jsonl")) == step)
            (process,) = (child for child in psutil.Process().children() if "follow" in child.cmdline())
            process.kill()
        write_rows(run.path, 3)
        raise KeyError("a failure of the run")

    with closing(acquire(run, "launch")) as lock, pytest.raises(KeyError), followed(config, run, lock, said.append):
        fail()
    assert (run.path / "rewards.csv").read_text() == "1,0.5\n2,0.5\n3,0.5\n"
    assert (run.follow / "end").read_text() == "failed"
    assert said == []


def offer_sink(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example of the docs, the sink ``csv``, as a package outside of the tree."""
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    source = page.partition("```python\n")[2].partition("```")[0]
    install(directory, "my_sinks", {"my_sinks.py": source}, "[async_rl.sinks]\ncsv = my_sinks:Csv\n", monkeypatch)


def test_a_run_that_has_ended_is_logged_afterwards_to_a_sink_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    offer_sink(tmp_path / "site", monkeypatch)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    command = [sys.executable, "-m", "async_rl", "follow", str(run.path), "--set"]
    run.config.write_text(config_to_toml(a_config(run.path)))
    for step in (1, 2):  # what it has is not sent again
        write_rows(run.path, step)
        done = subprocess.run([*command, 'log.to=["csv"]'], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert (run.path / "rewards.csv").read_text() == "1,0.5\n2,0.5\n"
    done = subprocess.run([*command, 'log.to=["cvs"]'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert 'log.to: expected csv, mlflow, tensorboard, trackio, wandb, got "cvs"' in done.stderr
    with closing(acquire(run, "launch")), pytest.raises(SystemExit, match="2"):
        main(["follow", str(run.path)])
    assert "(async-rl launch) uses" in capsys.readouterr().err


def test_what_a_package_says_of_its_sink_refuses_a_run_and_the_sink_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = (
        "from async_rl.errors import ConfigError\n"
        "def check(name, config):\n"
        "    raise ConfigError(f'log.to: {name} needs a key in {config.run.dir}')\n"
    )
    offered = "[async_rl.sinks]\nkeyed = keyed:Keyed\n[async_rl.sink_checks]\nkeyed = keyed_check:check\n"
    install(tmp_path / "site", "keyed", {"keyed.py": "1 / 0\n", "keyed_check.py": source}, offered, monkeypatch)
    with pytest.raises(ConfigError, match=f"log.to: keyed needs a key in {tmp_path}"):
        check_sinks(a_config(tmp_path, to=["keyed"]))


def test_samples_are_bounded_in_number_and_size():
    columns, rows = samples_table(3, [a_line(3, length=5000)] * 100)
    assert len(rows) == 32
    assert rows[0][columns.index("response")] == "x" * 2000 + "... (5000 characters)"
