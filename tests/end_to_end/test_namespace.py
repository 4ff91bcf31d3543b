"""A generator on another 'node': its own address, an empty home, and no sight of the model or the run directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.harness import ROOT, check_ledger, metrics, queue_address, roles, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

NUM_STEPS = 4


@dataclass(frozen=True)
class Network:
    namespace: str
    host_address: str


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    """A network namespace joined to this one by a veth pair; needs root and iproute2."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    name = f"arl{os.getpid()}"
    near, far = f"{name}a"[-15:], f"{name}b"[-15:]
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    try:
        sh("ip", "netns", "add", name)
        sh("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        sh("ip", "addr", "add", f"{subnet}.1/24", "dev", near)
        sh("ip", "link", "set", near, "up")
        sh("ip", "-n", name, "addr", "add", f"{subnet}.2/24", "dev", far)
        sh("ip", "-n", name, "link", "set", far, "up")
        sh("ip", "-n", name, "link", "set", "lo", "up")
        yield Network(name, f"{subnet}.1")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_generator_that_sees_only_the_network_joins_and_is_trained_on(tmp_path: Path, network: Network):
    secret, home = tmp_path / "secret", tmp_path / "home"
    secret.mkdir()
    home.mkdir()
    raw = tiny_config(
        secret,
        write_tiny_task(secret),
        learner={"steps": NUM_STEPS},
        queue={"address": f"tcp://{network.host_address}:0"},
        eval={"every": 0},
    )
    config = write_config(secret / "config.toml", raw)
    run_dir = secret / "run"
    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config), "--insecure")
        address = wait_until("the queue's address", lambda: queue_address(run_dir))
        assert network.host_address in address
        learner = start("learner", "learner", str(config), "--insecure")
        # An empty file system over the directory that holds the model and the run; the checkout stays readable.
        inside = f"mount -t tmpfs none {secret} && test ! -e {secret}/model && exec {sys.executable} -m async_rl"
        command = ["ip", "netns", "exec", network.namespace, "unshare", "--mount", "sh", "-c"]
        with (tmp_path / "remote.log").open("wb") as log:
            remote = subprocess.Popen(
                [*command, f"{inside} generator --connect {address} --insecure --id remote"],
                cwd=ROOT,
                env={"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            learner.succeed()
            assert remote.wait(60) == 0, (tmp_path / "remote.log").read_text()
        finally:
            remote.kill()
            remote.wait(10)
    assert check_ledger(run_dir)["groups"]["trained"] == NUM_STEPS * 4
    assert [row["step"] for row in metrics(run_dir) if "version" in row] == list(range(1, NUM_STEPS + 1))
