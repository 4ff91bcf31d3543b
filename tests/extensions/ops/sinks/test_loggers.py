"""The tools of ``log.to``: each has the run's rows, also after a resume, and none hurts the run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import config_to_toml
from async_rl.errors import ConfigError
from async_rl.run.directory import RunDir
from async_rl.run.following.follower import followed
from async_rl.run.following.sinks import check_sinks
from async_rl.run.lock import acquire
from async_rl.run.records.eval_records import write_json_lines
from async_rl.run.records.metrics import MetricsWriter
from tests.run.read_loggers import Rows, mlflow_rows, tensorboard_rows, trackio_rows, wandb_rows
from tests.run.test_feeds import a_line, started, write_rows
from tests.run.test_metrics import a_config


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))


def write_run(directory: Path, *to: str, **log: Any) -> None:
    """Six steps with an evaluation of an earlier step, then a failure; a rollback to step 4, and steps 5 to 8."""
    notes: list[str] = []
    for rewind, steps in ((-1, range(1, 7)), (4, range(5, 9))):
        sinks = started(directory, notes, *to, **log)
        writer = MetricsWriter(directory, a_config(directory))
        writer.rewind_to(rewind)
        for step in steps:
            writer.write({"step": step, "reward/mean": step + rewind / 8, "bad": float("nan"), "count": step})
            if step == 5:
                lines = [a_line(step, length=8 + rewind)] * 40
                write_json_lines(directory / "rollouts" / f"step-{step:06d}.jsonl", lines)
        writer.write({"step": steps[0], "eval/odd@name/accuracy": 0.25})
        writer.close()
        assert sinks.finish(is_failed=rewind < 0)
    assert notes == []


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
    write_run(tmp_path, "tensorboard")
    found = tensorboard_rows(tmp_path)
    check_rows(found)
    table = found[5]["rollouts"]
    assert len(table) == (1 + 32) * 8  # a header and 32 rows, of 8 cells
    assert table[8:16] == ["5", "7", "user: 5+1=", "x" * 12, "0.5", "1.0", "12", "stop"]  # 8 + 4
    assert '"path": "tiny"' in found[0]["config"][0]


@pytest.mark.slow
def test_wandb_has_the_rows_of_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nowhere = "http://127.0.0.1:9"  # nobody listens there: a request would fail
    for variable in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, nowhere)
    write_run(tmp_path, "wandb", wandb_mode="offline")
    found, ids, ends = wandb_rows(tmp_path)
    check_rows(found)
    assert ends == [("async-rl", 1), ("async-rl", 0)]
    assert ids == {(tmp_path / "logger_id").read_text()}
    assert (found[5]["rollouts._type"], found[5]["rollouts.nrows"]) == ("table-file", 32)


@pytest.mark.slow
def test_trackio_has_the_rows_of_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = pytest.importorskip("trackio.sqlite_storage", reason="make test-loggers installs Trackio")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)
    write_run(tmp_path, "trackio")
    found, names = trackio_rows()
    check_rows(found)
    assert names == {f"{tmp_path.name}-{(tmp_path / 'logger_id').read_text()[:6]}"}
    assert len(found[5]["rollouts"]["_value"]) == 32


@pytest.mark.slow
def test_mlflow_has_the_rows_of_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="make test-loggers installs MLflow")
    write_run(tmp_path, "mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    found, run = mlflow_rows(uri)
    check_rows(found, odd="odd_name")
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params["model.path"] == "tiny"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    table = mlflow.MlflowClient(uri).load_table(run.info.experiment_id, "rollouts/step-000005.json")
    assert set(table["row"]) == {7}


def test_a_sink_that_can_not_start_ends_only_a_run_that_has_not_begun(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("not a folder")
    config, notes = a_config(tmp_path, to=["tensorboard"]), list[str]()
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    error = pytest.raises(ConfigError, match=r'log\.to: tensorboard did not start: .*take "tensorboard" out of log.to')
    with closing(acquire(RunDir(tmp_path), "launch")) as lock:
        with error, followed(config, RunDir(tmp_path), lock, notes.append):
            raise AssertionError("the run began")
        assert notes == []
        write_rows(tmp_path, 1)
        with followed(config, RunDir(tmp_path), lock, notes.append):
            write_rows(tmp_path, 2)
    note, missing = notes
    assert note.startswith("tensorboard did not start: ")
    assert "goes on without it" in note
    assert missing.startswith("2 rows are missing in tensorboard (steps 1 to 2); ")
    assert (tmp_path / "notes.log").read_text().splitlines() == notes


def test_a_missing_package_is_refused_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mlflow").mkdir()  # a folder that hides nothing
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'async-rl\[mlflow\]'"):
        check_sinks(a_config(tmp_path, to=["mlflow"]))
    check_sinks(a_config(tmp_path, to=[]))


def test_wandb_online_finds_its_key_in_the_environment_or_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, netrc = a_config(tmp_path, to=["wandb"]), tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    check_sinks(config)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):  # instead of asking
        check_sinks(config)
    netrc.write_text("machine wandb.example login user password secret\n")
    netrc.chmod(0o600)
    with pytest.raises(ConfigError):
        check_sinks(config)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080/api")
    check_sinks(config)
