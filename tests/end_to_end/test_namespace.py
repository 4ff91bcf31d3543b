"""A generator on another 'node': its own address, an empty home, and no sight of the model or the run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Network
from tests.end_to_end.harness import ROOT, check_ledger, metrics, queue_address, roles, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

NUM_STEPS = 4


@pytest.mark.slow
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
