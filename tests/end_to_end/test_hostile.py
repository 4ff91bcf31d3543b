"""Many hostile connections at every port: honest peers are served, before, during and after; memory and descriptors
stay bounded. The attacker shares the address of the honest peers, which is the hardest case.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from psutil import Process

from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import SandboxFailedError
from async_rl.extensions.code_rewards.verifier import RemoteJudge
from async_rl.net.connections import MAX_CONNECTIONS, MAX_UNAUTHENTICATED
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.queue.client.clients import LearnerQueue
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.control import parse_channel
from tests.extensions.code_rewards.test_fuzz_verifier import TESTS, verifier
from tests.hostile import Attacker
from tests.queue.builders import make_config
from tests.queue.conftest import Servers
from tests.weights.test_tcp import a_plane, arrived, assert_same, model, stream_server

SERVED_S = 10.0
"""An honest peer gets its answer within this time, while the attack lasts and after it."""
MAX_GROWTH_BYTES = 128 << 20
MAX_DESCRIPTORS = MAX_UNAUTHENTICATED + 1100 + 64
"""Unauthenticated connections, those that libzmq has accepted unread, and what the honest peers need."""
CALM_S = 30.0
FEW, MANY = 200, 5000


@dataclass
class Port:
    """A port under attack. ``processes`` listen at it. ``serve`` asks for something, as an old and as a new peer."""

    kind: str
    address: tuple[str, int]
    processes: list[int]
    serve: Callable[[], None]
    max_known: int = 0
    """Hostile peers that count as clients: without keys, whoever speaks the protocol does."""


def check_port(port: Port, count: int, hold_s: float) -> None:
    """Attack it for ``hold_s`` after all connections have been opened once."""

    def serve() -> float:
        begun = time.monotonic()
        port.serve()
        return time.monotonic() - begun

    serve()
    before = {process: (process.memory_info().rss, process.num_fds()) for process in map(Process, port.processes)}
    waits, growths, descriptors = [], [], []

    def look() -> None:
        waits.append(serve())
        for process, (memory, fds) in before.items():
            growths.append(process.memory_info().rss - memory)
            descriptors.append(process.num_fds() - fds)

    with Attacker(port.kind, *port.address, count) as attacker:
        opened = threading.Thread(target=attacker.wait_until_open)
        opened.start()
        while opened.is_alive():
            look()
        ends_at = time.monotonic() + hold_s
        while time.monotonic() < ends_at:
            look()
            time.sleep(0.1)
        assert attacker.is_alive()
    look()
    calm_at = time.monotonic() + CALM_S
    while any(process.num_fds() > fds + 16 for process, (_, fds) in before.items()):
        assert time.monotonic() < calm_at, "descriptors stay open"
        look()
    print(
        f"{port.kind}, {count} connections: {len(waits)} honest rounds, the slowest {max(waits):.2f} s; memory grew by "
        f"at most {max(growths) / 2**20:.0f} MiB, {growths[-1] / 2**20:.0f} in the end; descriptors by "
        f"{max(descriptors)}"
    )
    assert max(waits) < SERVED_S
    assert max(growths) < MAX_GROWTH_BYTES
    assert max(descriptors) < MAX_DESCRIPTORS + min(count, port.max_known)


def made_keys(directory: Path, *, has_keys: bool) -> Path | None:
    if not has_keys:
        return None
    make_keys(directory / "keys", ["client"])
    return directory / "keys"


def client_keys(keys: Path | None) -> ClientKeys | None:
    return None if keys is None else ClientKeys.load(keys / "client.key")


@contextmanager
def queue_port(directory: Path, *, has_keys: bool) -> Iterator[Port]:
    keys = made_keys(directory, has_keys=has_keys)
    queue: Mapping[str, Any] = {} if keys is None else {"queue": {"keys": str(keys)}}
    with closing(Servers(directory)) as servers:
        server = servers.start(make_config(str(directory / "run"), **queue))
        host, port = server.address.removeprefix("tcp://").split(":")
        with closing(LearnerQueue(server.address, SERVED_S, client_keys(keys))) as old:

            def serve() -> None:
                assert old.ping() == ""
                with closing(LearnerQueue(server.address, SERVED_S, client_keys(keys))) as new:
                    assert new.ping() == ""

            known = 0 if has_keys else MAX_CONNECTIONS
            yield Port("zmtp", (host, int(port)), [server.process.pid], serve, known)
        server.process.terminate()
        _, log = server.process.communicate(timeout=CALM_S)
        assert server.process.returncode == 0, log[-3000:]
        assert "Traceback" not in log


@contextmanager
def weights_ports(directory: Path, *, has_keys: bool) -> Iterator[tuple[Port, Port]]:
    """The control port, whose publisher is a thread of this process, and the stream server's."""
    keys = made_keys(directory, has_keys=has_keys)
    options = {} if keys is None else {"keys": ServerKeys.load(keys), "is_encrypted": True}
    version = 0
    with a_plane(**options) as plane, closing(Receiver("old", insecure=False, keys=client_keys(keys))) as old:
        old.follow(plane.announcement(plane.publish(0, model(0))))
        arrived(old, 0)

        def serve() -> None:
            nonlocal version
            version += 1
            staged = plane.publish(version, model(1))
            with closing(Receiver(f"new-{version}", insecure=False, keys=client_keys(keys))) as new:
                new.follow(plane.announcement(staged))
                for receiver in (old, new):
                    assert_same(arrived(receiver, version), model(1))

        address, _ = parse_channel(plane.publisher.address)
        control_port, stream = int(address.rsplit(":", 1)[1]), stream_server(plane)
        processes = [os.getpid(), stream.pid]
        known = 0 if has_keys else MAX_CONNECTIONS
        yield (
            Port("zmtp", ("127.0.0.1", control_port), processes, serve, known),
            Port("weights", ("127.0.0.1", stream.port), processes, serve),
        )
        assert stream_server(plane).pid == stream.pid


@contextmanager
def verifier_port() -> Iterator[Port]:
    with verifier() as (port, pid):
        judge = RemoteJudge(CodeRewardConfig(endpoint=f"http://127.0.0.1:{port}"), pause_s=0.1)

        def serve() -> None:
            gives_up_at = time.monotonic() + SERVED_S
            while True:
                try:
                    assert judge.judge("print(1)", TESTS).all_passed
                    return
                except SandboxFailedError:  # it had no room for this connection
                    assert time.monotonic() < gives_up_at

        yield Port("http", ("127.0.0.1", port), [pid], serve)


WITH_AND_WITHOUT = pytest.mark.parametrize("has_keys", [False, True], ids=["without keys", "with keys"])
COUNTS = pytest.mark.parametrize(
    "count, hold_s",
    [
        pytest.param(FEW, 0.5, marks=pytest.mark.slow, id="200"),
        pytest.param(MANY, 20.0, marks=[pytest.mark.long, pytest.mark.timeout(600)], id="5000"),
    ],
)


@COUNTS
@WITH_AND_WITHOUT
def test_the_queue_serves_during_an_attack_on_its_port(tmp_path: Path, has_keys: bool, count: int, hold_s: float):
    with queue_port(tmp_path, has_keys=has_keys) as port:
        check_port(port, count, hold_s)


@COUNTS
@WITH_AND_WITHOUT
def test_weights_arrive_during_an_attack_on_their_ports(tmp_path: Path, has_keys: bool, count: int, hold_s: float):
    with weights_ports(tmp_path, has_keys=has_keys) as ports:
        for port in ports:
            check_port(port, count, hold_s)


@COUNTS
def test_the_verifier_judges_during_an_attack_on_its_port(count: int, hold_s: float):
    with verifier_port() as port:
        check_port(port, count, hold_s)
