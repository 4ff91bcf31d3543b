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
import zmq

from async_rl.net.link import Link
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


def says(role: Role, text: str) -> None:
    wait_until(f"{text!r} in the log of the {role.name}", lambda: text in role.log)


def test_an_attempt_to_connect_is_given_up_before_the_next_packet_is_far_away():
    # Linux sends SYN packets for one connection 1, 3, 7, 15, 31 and 63 s after the first: a port that is opened after a
    # minute would be found a minute later. A new attempt begins with a packet.
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        link = Link(client, "tcp://127.0.0.1:9", "the queue server")
        assert 0 < int(client.getsockopt(zmq.CONNECT_TIMEOUT)) <= 7000
        link.close()


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

        says(remote, f"open port {port} ")
        firewall.open(port)
        to_open = f"open the ports {port + 1} and {port + 2} (weights.port) on the machine of the learner"
        for role in (remote, queue):
            says(role, f"no answer from {host}:{port + 1} in 3 s; a firewall may drop the packets: {to_open}")
        assert to_open in problems(run_dir)
        firewall.open(port + 1)
        for role in (remote, queue):
            says(role, f"no answer from {host}:{port + 2} in 5 s; a firewall may drop the packets: {to_open}")
        firewall.open(port + 2)
        learner.succeed()
        remote.succeed()
        assert "silent" not in remote.log
    assert check_ledger(run_dir)["groups"]["trained"] == NUM_STEPS * 4
