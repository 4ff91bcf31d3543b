"""A run that is mirrored, killed in mid-copy, and resumed in another directory by the mirror's URL alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import fsspec.config
import pytest

from async_rl.extensions.ops.mirror.manifest import newest_manifest
from async_rl.extensions.ops.mirror.store import Store
from async_rl.run.directory import RunDir
from tests.end_to_end.faults_harness import Gates, fault_config, kill_all, trained_rows
from tests.end_to_end.harness import Role, check_ledger, metrics, roles, steps, wait_until
from tests.ports import free_port

NUM_ROWS = 80


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def store_server(log: Path, *command: str, port: int) -> Iterator[None]:
    """A module of Python that serves objects at ``port`` of loopback."""
    with log.open("wb") as output:
        server = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output)
    try:
        wait_until("the server of objects", lambda: answers(port))
        yield
    finally:
        server.kill()
        server.wait()


def find_store(protocol: str, environment: dict[str, str], **settings: str) -> dict[str, str]:
    """Let this process find a store as its children do, by ``environment``."""
    os.environ.update(environment)
    fsspec.config.conf[protocol] = settings
    return environment


@contextlib.contextmanager
def s3(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A loopback S3. Yield a URL in it, and the environment with which fsspec finds it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_DEFAULT_REGION": "us-east-1",
        "FSSPEC_S3_ENDPOINT_URL": url,
    }  # fmt: skip
    with store_server(directory / "store", "moto.server", "-H", "127.0.0.1", "-p", str(port), port=port):
        find_store("s3", environment, key="testing", secret="testing-secret", endpoint_url=url)
        fsspec.filesystem("s3", **fsspec.config.conf["s3"]).mkdir("runs")
        yield "s3://runs/one", environment


@contextlib.contextmanager
def gs(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    port = free_port()
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "FSSPEC_GS_TOKEN": "anon",
        # gcsfs asks the real service for the kind of a bucket, which the emulator can't answer.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }  # fmt: skip
    options = ("--host", "127.0.0.1", "--port", str(port), "--in-memory", "--default-bucket", "runs")
    with store_server(directory / "store", "gcp_storage_emulator", "start", *options, port=port):
        yield "gs://runs/one", find_store("gs", environment, token="anon")


@contextlib.contextmanager
def file(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    yield f"file://{directory}/store/run", {}


def run_killed_and_resumed(directory: Path, url: str, environment: dict[str, str]) -> tuple[Role, RunDir]:
    """Mirror a run, kill it while its second checkpoint is copied, and go on by ``url`` in another directory."""
    config = fault_config(directory, num_rows=NUM_ROWS, checkpoint={"every": 2, "keep_last": 1, "mirror": url})
    run, other, gates = RunDir(directory / "run"), RunDir(directory / "elsewhere"), Gates(directory / "gates")
    environment = {**environment, "ASYNC_RL_TEST": str(directory), "ASYNC_RL_FAULTS": str(gates.directory)}
    store = Store(url)

    def mirrored() -> str | None:
        found = newest_manifest(store)
        return None if found is None else found.latest

    with roles(directory / "logs") as start:
        try:
            first = start("first", "launch", str(config), env=environment, is_program=True)
            before = wait_until("a mirrored checkpoint", mirrored, deadline_s=240)
            gates.arm("mirror.copied")
            copier = wait_until("a copy under way", lambda: gates.held("mirror.copied"))
            # The run itself goes on while its mirror stands still.
            at = len(steps(run.path))
            wait_until("further steps", lambda: len(steps(run.path)) >= at + 2 or run.is_finished)
            first.kill()
            first.wait()
            os.kill(copier, signal.SIGKILL)
            gates.release("mirror.copied")
            copied = mirrored()
            assert copied is not None
            assert copied >= before
            trained = [row["step"] for row in trained_rows(run.path)]
            assert int(copied.removeprefix("step-")) < trained[-1], "what is not copied is trained again"

            options = ("--set", f"run.dir={other.path}")
            again = start("again", "launch", str(config), *options, env=environment, is_program=True)
            again.succeed(deadline_s=480)  # it watches the mirror for three minutes before
            assert f"fetched the run from {url}: {copied}" in again.log
            back = start("back", "launch", str(config), env=environment, is_program=True)
            assert back.wait() == 2
            assert "name an empty run.dir" in back.log
        finally:
            kill_all(f"ASYNC_RL_TEST={directory}")
    return again, other


def judge(again: Role, other: RunDir, store: Store) -> None:
    """Every prompt is trained once in the surviving history, the ledger adds up, and the mirror has all."""
    positions = [position for row in trained_rows(other.path) for position, _ in row["groups"]]
    assert sorted(positions) == list(range(NUM_ROWS))
    assert steps(other.path) == list(range(1, NUM_ROWS // 2 + 1))
    check_ledger(other.path)
    assert other.is_finished
    assert any("mirror/behind_steps" in row for row in metrics(other.path))
    found = newest_manifest(store)
    assert found is not None
    assert (found.has_ended, found.latest) == (True, other.latest_checkpoint)
    assert {"finished.json", "run_id", "metrics.jsonl"} < found.files.keys()
    assert any(name.startswith("export/") for name in found.files)
    assert f"mirror: {store.url} has {other.latest_checkpoint}" in again.log


STORES = {"file": (file, ()), "s3": (s3, ("s3fs", "moto", "flask")), "gs": (gs, ("gcsfs", "gcp_storage_emulator"))}
"""Each with the packages that it needs."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STORES)
def test_a_run_that_is_killed_in_mid_copy_goes_on_elsewhere_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    store, packages = STORES[name]
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(fsspec.config, "conf", {})
    with store(tmp_path) as (url, environment):
        again, other = run_killed_and_resumed(tmp_path, url, environment)
        judge(again, other, Store(url))
    assert "testing-secret" not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.log"))
