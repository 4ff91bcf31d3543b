"""Who was sent away stays away: a client's line is deleted while it is connected, over real sockets."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.client.connection import Connection
from async_rl.queue.messages import Announcement, Ping
from async_rl.weights import control
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.scheduler import DropAction
from async_rl.weights.staging import Staging
from async_rl.weights.tcp.protocol import make_request
from tests.end_to_end.harness import wait_until
from tests.queue.builders import make_config
from tests.queue.conftest import DEADLINE_S
from tests.weights.test_scheduler import deliver, rounds_with

GONE_S = 5.0
"""Within this time a removed client gets nothing more."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["node7"])
    return tmp_path / "keys"


def key_of(keys: Path, name: str) -> ClientKeys:
    return ClientKeys.load(keys / f"{name}.key")


def remove(keys: Path, name: str) -> Callable[[], object]:
    """Delete the client's line. Return what puts it back."""
    path, public = keys / "allowed.txt", key_of(keys, name).public.decode()
    before = path.read_text()
    path.write_text("".join(line for line in before.splitlines(keepends=True) if not line.startswith(public)))
    return lambda: path.write_text(before)


def asked_until_gone(is_answered: Callable[[], bool]) -> float:
    """Ask again and again until no answer comes. Return after how many seconds the last one came."""
    start = last = time.monotonic()
    while time.monotonic() - start < GONE_S + 1.0:
        if is_answered():
            last = time.monotonic()
    return last - start


@pytest.mark.slow
def test_the_queue_server_answers_a_removed_client_no_more_and_all_others(servers, tmp_path: Path, keys: Path):
    server = servers.start(make_config(str(tmp_path / "run"), queue={"keys": str(keys)}))
    with (
        closing(Connection(server.address, "removed", key_of(keys, "node7"))) as removed,
        closing(Connection(server.address, "silent", key_of(keys, "node7"))) as silent,
        closing(LearnerQueue(server.address, DEADLINE_S, key_of(keys, "client"))) as other,
    ):
        silent.post(Ping())
        wait_until("the only answer to the silent one", lambda: bool(silent.poll(0.05)))

        def is_answered() -> bool:
            assert other.ping() == ""
            removed.post(Ping())
            return bool(removed.poll(0.05))

        wait_until("the first answer", is_answered)
        put_back = remove(keys, "node7")
        assert 0 < asked_until_gone(is_answered) < GONE_S
        wait_until("the refusal", lambda: not removed.poll(0.05) and "refuses the key" in removed.link.trouble)
        # It sent nothing, so no message showed its key again; notices would still have reached it.
        assert not silent.poll(0.0)
        assert not silent.link.is_connected
        put_back()
        wait_until("an answer under the listed key", is_answered)
    server.process.send_signal(signal.SIGTERM)
    assert "the key of client 'node7'" in server.process.communicate(timeout=20)[1]


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "weight", torch.full((1000,), float(version))


@pytest.mark.slow
def test_a_removed_generator_gets_no_more_versions_and_the_others_all(keys: Path, caplog: pytest.LogCaptureFixture):
    server = ServerKeys.ephemeral(keys)
    staging = Staging(None, 1 << 16, deadline_s=DEADLINE_S, is_pulled=True, min_versions=2)
    with ExitStack() as stack:
        publisher = Publisher("127.0.0.1", deadline_s=20.0, insecure=False, keys=server, transport="tcp")
        stack.enter_context(closing(publisher))
        receivers = {
            name: stack.enter_context(closing(Receiver(name, insecure=False, keys=key_of(keys, name))))
            for name in ("client", "node7")
        }

        def publish(version: int) -> None:
            staged = staging.stage("line", version, weights(version))
            publisher.publish(staged)
            for receiver in receivers.values():
                receiver.follow(Announcement("line", version, staged.manifest.digest, publisher.address))

        def came(name: str, version: int, within_s: float = DEADLINE_S) -> bool:
            end = time.monotonic() + within_s
            while time.monotonic() < end:
                receivers[name].wait(0.05)
                received = receivers[name].poll()
                if received is not None:
                    receivers[name].activated(received)
                    if received.version == version:
                        return True
            return False

        publish(0)
        assert came("client", 0)
        assert came("node7", 0)
        put_back = remove(keys, "node7")
        wait_until("the removed one to be dropped", lambda: publisher.stats().members == 1)
        assert "generator node7 gets no more weights" in caplog.text
        publish(1)
        assert came("client", 1)
        assert publisher.wait(1, DEADLINE_S)
        assert not came("node7", 1, within_s=1.0)
        assert publisher.stats().members == 1
        put_back()
        assert came("node7", 1)


@pytest.mark.slow
def test_a_pull_of_a_removed_generator_breaks_off(keys: Path):
    staging = Staging(None, 1 << 24, deadline_s=DEADLINE_S, is_pulled=True, min_versions=2)
    server = ServerKeys.ephemeral(keys)
    with ExitStack() as stack:
        publisher = Publisher("127.0.0.1", deadline_s=20.0, insecure=False, keys=server, transport="tcp")
        stack.enter_context(closing(publisher))
        publisher.publish(staging.stage("line", 0, iter([("weight", torch.zeros(16 << 20))])))
        address, server_key = control.parse_channel(publisher.address)
        mine = control.keys_towards(server_key, key_of(keys, "node7"))
        member = control.PublisherSocket(address, mine)
        stack.callback(member.leave)
        wait_until("the connection", lambda: member.receive() is None and member.is_connected)
        assert member.send(control.Join("node7", "127.0.0.1", [], 1, ""))
        offered: list[control.Pull] = []

        def is_offered() -> bool:
            message = member.receive()
            if isinstance(message, control.Pull):
                offered.append(message)
            return bool(offered)

        wait_until("the offer of a pull", is_offered)
        (pull,) = offered
        with socket.create_connection(("127.0.0.1", pull.port)) as connection:
            connection.sendall(make_request(pull.token, [0]).encode())
            assert connection.recv(1000)
            remove(keys, "node7")
            start = time.monotonic()

            def is_dropped() -> bool:  # it is alive all the time, and reads slowly
                member.receive()
                member.send(control.Heartbeat(int(time.monotonic())))
                return publisher.stats().members == 0

            wait_until("the removed one to be dropped", is_dropped)
            connection.settimeout(GONE_S)
            received = 0
            while data := _received(connection):
                received += len(data)
            assert received < 64 << 20, "the rest of the version came"
            assert time.monotonic() - start < GONE_S
        with socket.create_connection(("127.0.0.1", pull.port), timeout=GONE_S) as connection:
            connection.sendall(make_request(pull.token, [0]).encode())
            assert _received(connection) == b""


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except ConnectionResetError:
        return b""


def test_a_removed_generator_is_in_no_plan_of_a_later_collective():
    scheduler = rounds_with(b"a", b"b")
    deliver(scheduler, 0, b"a", b"b")
    scheduler.drop(b"b", "its key was removed")
    assert scheduler.advance(0.0) == [DropAction(b"b", "its key was removed")]
    deliver(scheduler, 1, b"a")
