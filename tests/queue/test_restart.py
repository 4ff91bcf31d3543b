"""A queue server that dies: what was lost with it is sent again at once, and a learner starts its own again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from async_rl.config.config import Config
from async_rl.errors import QueueError, WireError
from async_rl.net.wire import Limits, decode, encode
from async_rl.queue.client import connection
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.client.connection import Connection
from async_rl.queue.messages import Ping
from async_rl.queue.server.start import QueueRestarter, ensure_queue, finish_queue
from tests.ports import free_address
from tests.queue.builders import make_config
from tests.queue.conftest import ROOT, attach

COMMAND = (sys.executable, "-m", "tests.queue.serve")


def pid_of(config: Config) -> int:
    return json.loads((Path(config.run.dir) / "queue.json").read_text())["pid"]


def test_requests_that_a_dead_server_took_along_are_repeated_as_soon_as_the_next_is_there(
    servers, tmp_path, monkeypatch
):
    monkeypatch.setattr(connection, "RESEND_S", 1000.0)
    config = make_config(str(tmp_path / "run"))
    first = servers.start(config, "--run-id", "run")
    client = Connection(first.address, "client")
    try:
        client.post(Ping())
        assert client.poll(10.0)
        assert client.link.is_connected
        first.process.send_signal(signal.SIGSTOP)
        client.post(Ping())  # it reaches the socket of a process that will never read it
        assert not client.poll(0.2)
        assert client.link.is_connected
        first.process.kill()
        first.process.wait()
        assert not client.poll(0.2)
        assert not client.link.is_connected
        servers.start(config, "--run-id", "run")
        ((request, answer),) = client.poll(30.0)
        assert request is not None
        assert answer.type == "pong"
    finally:
        client.close()


def test_a_server_that_can_t_have_its_port_back_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, log = make_config(str(tmp_path / "run")), tmp_path / "queue.log"
    address = ensure_queue(config, "run", False, log, command=COMMAND)
    first = pid_of(config)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        try:
            with pytest.raises(QueueError, match=f"expected the queue server back at {address}.*its port was taken"):
                QueueRestarter(config, "run", False, log, address, command=COMMAND)()
        finally:
            os.kill(pid_of(config), signal.SIGKILL)


def test_a_server_that_dies_of_each_request_is_not_started_for_ever():
    queue = LearnerQueue(free_address(), revive=lambda: True)
    with pytest.raises(QueueError, match="died 6 times before it had answered request 'ping'"):
        queue.ping()
    queue.close()


def test_a_learner_that_died_before_its_farewell_tells_its_queue_when_it_is_started_again(servers, tmp_path):
    config = make_config(str(tmp_path / "run"))
    server = servers.start(config, "--run-id", "run")
    attach(servers.learner(server.address))
    finish_queue(config, "another run")
    assert server.process.poll() is None
    finish_queue(config, "run")
    assert "ended: the run is finished" in server.process.communicate(timeout=30)[0]
    finish_queue(config, "run")  # nobody is there any more: nothing to do


def test_a_learner_brings_a_killed_server_back_also_one_that_was_started_by_hand(servers, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, log = make_config(str(tmp_path / "run")), tmp_path / "queue.log"
    first = servers.start(config)  # nobody told it which run it serves
    revive = QueueRestarter(config, "run", False, log, first.address, command=COMMAND)
    queue = LearnerQueue(first.address, revive=revive)
    try:
        attach(queue)
        assert not revive(), "it is alive"
        first.process.kill()
        first.process.wait()
        assert queue.status()["lineage"] == "line-a"
    finally:
        queue.close()
        os.kill(pid_of(config), signal.SIGKILL)


def test_a_generator_gets_no_welcome_of_a_learner_that_has_ended(servers, tmp_path):
    """The journal keeps the welcome. The next learner's config or code may be another one."""
    config = make_config(str(tmp_path / "run"))
    first = servers.start(config, "--run-id", "run")
    old = servers.learner(first.address)
    attach(old)
    old.close()  # its thread would report that it is alive
    first.process.kill()
    first.process.wait()
    second = servers.start(config, "--run-id", "run")
    generator = servers.generator(second.address)
    with pytest.raises(QueueError, match="waits for a learner to attach"):
        generator.hello(3.0, "fake")
    attach(servers.learner(second.address), "line-b", parent_lineage="line-a")
    generator.hello(10.0, "fake")


def answer_twice_and_leave(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Answer two requests. Then close the socket and end its context, as a server's process does at its end."""
    for _ in range(2):
        peer, frame = socket.recv_multipart()
        request_id = decode(frame, Limits(max_bytes=1 << 20)).fields["request_id"]
        socket.send_multipart([peer, encode("ok", {"request_id": request_id})])
    socket.close(linger=2000)
    context.term()


def test_the_last_answer_of_a_server_that_ends_right_after_it_is_not_lost():
    # libzmq loses it, sometimes, if the client's socket drops its queues at the end of a connection.
    for _ in range(30):
        context = zmq.Context[zmq.Socket[bytes]]()
        socket = context.socket(zmq.ROUTER)
        address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        with ThreadPoolExecutor(1) as pool, closing(Connection(address, "client")) as client:
            pool.submit(answer_twice_and_leave, socket, context)
            for _ in range(2):
                request_id = client.post(Ping())
                deadline = time.monotonic() + 10.0
                while not any(request.request_id == request_id for request, _ in client.poll(1.0) if request):
                    assert time.monotonic() < deadline, "the answer was lost"


def test_a_malformed_answer_is_an_error_that_names_the_queue_server():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other_program:
        address = f"tcp://127.0.0.1:{other_program.bind_to_random_port('tcp://127.0.0.1')}"
        with closing(Connection(address, "learner")) as connection:
            connection.post(Ping())
            connection.poll(0.0)
            while not other_program.poll(10):
                connection.poll(0.0)
            sender = other_program.recv_multipart()[0]
            other_program.send_multipart([sender, b"HTTP/1.1 400 Bad Request"])
            with pytest.raises(WireError, match=f"^the queue server at {address} sent a malformed.*not async-rl"):
                connection.poll(30.0)
