"""Two 'machines' with a firewall between them: both sides name the port that is closed, and go on once it is open."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from tests.end_to_end.conftest import Firewall
from tests.end_to_end.harness import ROOT, Role, check_ledger, roles, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

NUM_STEPS = 3
CLOSED_S = 37.0
"""Linux sends SYN packets for one connection 19, 35 and 67 s after the first, older versions after 15, 31 and 63 s."""
CONNECT_S = 12.0
CLIENTS = """
import sys
from async_rl.queue.client.connection import Connection
from async_rl.weights.control import PublisherSocket
queue_address, weights_address = sys.argv[1:]
weights = PublisherSocket(weights_address, None)
queue = Connection(queue_address, "client")
waiting = {"queue": lambda: queue.link.is_connected, "weights": lambda: weights.is_connected}
print("begun", flush=True)
while waiting:
    queue.poll(0.05)
    weights.receive()
    for name in [name for name, is_connected in waiting.items() if is_connected()]:
        print(name, flush=True)
        del waiting[name]
"""
"""A client of the queue server and a client of the learner. Each prints its name once it is connected."""


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


@contextmanager
def servers(host: str, *ports: int) -> Iterator[None]:
    """Servers that accept every ZeroMQ client."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.ROUTER) for _ in ports]
    try:
        for listener, port in zip(sockets, ports, strict=True):
            listener.bind(f"tcp://{host}:{port}")
        yield
    finally:
        context.destroy(linger=0)


@pytest.mark.long
def test_clients_connect_soon_after_a_port_is_opened_that_was_closed_for_long(firewall: Firewall):
    host = firewall.network.host_address
    port = three_free_ports(host)
    addresses = (f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}")
    command = ["ip", "netns", "exec", firewall.network.namespace, sys.executable, "-c", CLIENTS, *addresses]
    with (
        servers(host, port, port + 1),
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as clients,
    ):
        try:
            assert clients.stdout is not None
            assert clients.stdout.readline() == "begun\n"
            time.sleep(CLOSED_S)  # the subject: the kernel's pauses between two packets grow with this time
            assert clients.poll() is None
            opened_at = time.monotonic()
            firewall.open(port, port + 1)
            connected = {clients.stdout.readline().strip() for _ in addresses}
            took_s = time.monotonic() - opened_at
        finally:
            clients.kill()
    assert connected == {"queue", "weights"}
    assert took_s < CONNECT_S


def problems(run_dir: Path) -> str:
    """What ``async-rl status`` says about generators."""
    command = [sys.executable, "-m", "async_rl", "status", str(run_dir), "--json"]
    shown = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    return "".join(generator["trouble"] for generator in shown["generators"])


def says(role: Role, text: str) -> None:
    wait_until(f"{text!r} in the log of the {role.name}", lambda: text in role.log)


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
