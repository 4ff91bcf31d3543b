"""Two 'machines' with a firewall between them: both sides name the port that is closed, and go on once it is open."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Firewall
from tests.end_to_end.harness import ROOT, Role, check_ledger, roles, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

NUM_STEPS = 3


def three_free_ports(host: str) -> int:
    """Return the first of three ports in a row that nobody uses."""
    for first in range(21_000 + os.getpid() % 1000 * 3, 30_000, 3):
        try:
            for port in range(first, first + 3):
                with closing(socket.socket()) as probe:
                    probe.bind((host, port))
        except OSError:
            continue
        return first
    raise AssertionError("no three free ports in a row")


def problems(run_dir: Path) -> str:
    """What ``async-rl status`` says about generators."""
    command = [sys.executable, "-m", "async_rl", "status", str(run_dir), "--json"]
    shown = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    return "".join(generator["trouble"] for generator in shown["generators"])


def names_port(role: Role, closed: int) -> None:
    wait_until(f"port {closed} in the log of the {role.name}", lambda: f"open port {closed} " in role.log)


@pytest.mark.slow
def test_a_closed_port_is_named_by_both_sides_and_the_run_goes_on_once_it_is_open(tmp_path: Path, firewall: Firewall):
    host = firewall.network.host_address
    port = three_free_ports(host)
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        learner={"steps": NUM_STEPS},
        queue={"address": f"tcp://{host}:{port}"},
        weights={"port": f"{port + 1}-{port + 2}"},
        eval={"every": 0},
    )
    config, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        queue = start("queue", "queue", str(config), "--insecure")
        learner = start("learner", "learner", str(config), "--insecure")
        address = f"tcp://{host}:{port}"
        remote = start("remote", "generator", "--connect", address, "--insecure", "--id", "remote",
                       namespace=firewall.network.namespace)  # fmt: skip

        names_port(remote, port)
        firewall.open(port)
        names_port(remote, port + 1)
        names_port(queue, port + 1)
        assert f"open port {port + 1} " in problems(run_dir)
        firewall.open(port + 1)
        names_port(remote, port + 2)
        names_port(queue, port + 2)
        firewall.open(port + 2)
        learner.succeed()
        remote.succeed()
    assert check_ledger(run_dir)["groups"]["trained"] == NUM_STEPS * 4
