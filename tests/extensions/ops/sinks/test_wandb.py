"""Weights & Biases: rows arrive, and a server that is away, hangs, refuses or dies stops and delays no run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from async_rl.config.loading import config_to_toml
from async_rl.errors import ConfigError
from async_rl.run.directory import RunDir
from async_rl.run.following import feeds
from async_rl.run.following.follower import followed
from async_rl.run.lock import acquire
from tests.extensions.ops.sinks.wandb_server import WandbServer, closed_url, wandb_server
from tests.run.read_loggers import history
from tests.run.test_feeds import started, write_rows
from tests.run.test_metrics import a_config

pytestmark = pytest.mark.slow  # each test starts wandb once or twice, which takes seconds


@pytest.fixture(autouse=True)
def _account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with wandb_server() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        yield found


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit_s in (("SERVER_S", 3.0), ("FINISH_S", 3.0), ("MARGIN_S", 5.0)):
        monkeypatch.setattr(feeds, name, limit_s)


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_server_that_is_away_gets_the_rows_later(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch, kind: str
):
    notes: list[str] = []
    server.is_silent.set()
    monkeypatch.setenv("WANDB_BASE_URL", server.url if kind == "silent" else closed_url())
    sinks = started(tmp_path, notes, "wandb", refuses=True)
    write_rows(tmp_path, 1)
    assert notes[0].startswith("wandb did not start: ")
    assert "the run goes on, it is tried again" in notes[0]
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    server.is_silent.clear()
    assert sinks.finish(is_failed=False)
    assert [row["step"] for row in server.rows] == [1]
    assert len(notes) == 1, notes


def test_a_key_that_the_server_refuses_ends_only_a_run_that_has_not_begun(tmp_path: Path, server: WandbServer):
    notes: list[str] = []
    server.status = 401
    with pytest.raises(ConfigError, match="401"):
        started(tmp_path, notes, "wandb", refuses=True)
    started(tmp_path, notes, "wandb")
    (note,) = notes
    assert "401" in note
    assert "goes on without it" in note


@pytest.mark.usefixtures("short_limits")
def test_a_server_that_dies_delays_the_end_only_a_little(tmp_path: Path, server: WandbServer):
    notes: list[str] = []
    sinks = started(tmp_path, notes, "wandb", refuses=True)
    server.is_silent.set()
    began = time.monotonic()
    write_rows(tmp_path, *range(1, 1001))
    sinks.finish(is_failed=False)
    assert time.monotonic() - began < 30.0  # 8 s, on a busy machine
    assert len(notes) == 1, notes
    assert f"wandb sync {sinks.places['wandb']}" in notes[0]
    (file,) = Path(sinks.places["wandb"]).glob("*.wandb")
    assert len(history(file)) == 1000


def test_no_process_outlives_the_follower(tmp_path: Path, server: WandbServer):
    run = RunDir(tmp_path)
    config = a_config(tmp_path, to=["wandb"])
    run.config.write_text(config_to_toml(config))
    with closing(acquire(run, "launch")) as lock, followed(config, run, lock, print):
        (child,) = (one for one in psutil.Process().children() if "follow" in one.cmdline())
        processes = [child, *child.children(recursive=True)]
        assert len(processes) > 1  # wandb's service is one of them
        server.is_silent.set()
        write_rows(tmp_path, 1)
    assert psutil.wait_procs(processes, timeout=30)[1] == []
