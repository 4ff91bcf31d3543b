"""A queue server that dies: what was lost with it is sent again at once, and a learner starts its own again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from async_rl.config.config import Config
from async_rl.errors import QueueError
from async_rl.net.wire import Limits, decode, encode
from async_rl.queue.client import connection
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.client.connection import Connection
from async_rl.queue.messages import Ping
from async_rl.queue.server.start import QueueRestarter, answering_run, ensure_queue, finish_queue
from tests.queue.builders import make_config
from tests.queue.conftest import ROOT, attach, wait_until

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


def test_a_learner_brings_its_killed_server_back(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, log = make_config(str(tmp_path / "run")), tmp_path / "queue.log"
    address = ensure_queue(config, "run", False, log, command=COMMAND)
    first = pid_of(config)
    revive = QueueRestarter(config, "run", False, log, address, command=COMMAND)
    queue = LearnerQueue(address, revive=revive)
    try:
        attach(queue)
        assert not revive()
        os.kill(first, signal.SIGKILL)  # nobody waits for it, so its id stays taken
        assert queue.status()["lineage"] == "line-a"
        assert pid_of(config) != first
    finally:
        queue.close()
        os.kill(pid_of(config), signal.SIGKILL)


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


def test_a_server_that_is_killed_while_it_starts_is_started_again(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(ROOT)
    config, log, once = make_config(str(tmp_path / "run")), tmp_path / "queue.log", tmp_path / "died"
    script = f'[ -e {once} ] || {{ touch {once}; kill -KILL $$; }}; exec {sys.executable} -m tests.queue.serve "$@"'
    with caplog.at_level("WARNING"):
        ensure_queue(config, "run", False, log, command=("sh", "-c", script, "sh"))
    second = pid_of(config)
    os.kill(second, signal.SIGKILL)
    os.waitpid(second, 0)
    assert "killed by signal 9 before it answered" in caplog.text
    with pytest.raises(QueueError, match="ended with code -9"):
        ensure_queue(config, "run", False, log, command=("sh", "-c", "kill -KILL $$"))


def test_a_server_that_dies_of_each_request_is_not_started_for_ever():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        queue = LearnerQueue(f"tcp://127.0.0.1:{probe.getsockname()[1]}", revive=lambda: True)
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


def test_a_server_that_is_away_is_said_once_and_so_is_its_return(servers, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("async_rl.net.link.LOST_AFTER_S", 0.0)
    config = make_config(str(tmp_path / "run"))
    first = servers.start(config, "--run-id", "run")
    queue = servers.learner(first.address)
    attach(queue)
    first.process.kill()
    first.process.wait()

    def is_lost() -> bool:
        queue._connection.poll(0.0)
        return not queue._connection.link.is_connected

    # The socket notices the death a moment after it.
    wait_until(is_lost, "the end of the connection")
    with caplog.at_level("INFO"):
        queue._watch_connection("status", 2.0)
        assert caplog.messages == []  # a request that ends soon says nothing: it raises an error
        request = queue._connection.post(Ping())

        def is_said() -> bool:
            queue._connection.poll(0.0)
            return not queue._watch_connection("ping", 60.0) and bool(caplog.messages)

        wait_until(is_said, "a warning")
        servers.start(config, "--run-id", "run")
        queue._await(request, "ping", 0.0)
    told = [message for message in caplog.messages if "queue server" in message]
    place = first.address.removeprefix("tcp://")
    assert told[0].startswith(f"nothing listens at {place} (connection refused)")
    assert "The request 'ping' waits up to" in told[0]
    assert told[-1].startswith(f"the queue server at {first.address} answers, after")
    assert len(told) == len(set(told))


def test_a_server_that_was_started_by_hand_is_brought_back_too(servers, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, log = make_config(str(tmp_path / "run")), tmp_path / "queue.log"
    first = servers.start(config)  # nobody told it which run it serves
    queue = LearnerQueue(
        first.address, revive=QueueRestarter(config, "run", False, log, first.address, command=COMMAND)
    )
    try:
        attach(queue)
        first.process.kill()
        first.process.wait()
        assert queue.status()["lineage"] == "line-a"
    finally:
        queue.close()
        os.kill(pid_of(config), signal.SIGKILL)


def test_a_journal_of_no_run_yet_is_taken_over_by_the_first_that_names_one(servers, tmp_path):
    config = make_config(str(tmp_path / "run"))
    first = servers.start(config)
    servers.generator(first.address).request_leases("", 0, 1, 0.0)  # something to write down
    assert answering_run(first.address, 10.0) == ""
    first.process.kill()
    first.process.wait()
    second = servers.start(config, "--run-id", "run")
    assert answering_run(second.address, 10.0) == "run"


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
        generator.hello(0.5, "fake")
    attach(servers.learner(second.address), "line-b", parent_lineage="line-a")
    generator.hello(10.0, "fake")


def test_a_generator_is_welcome_again_when_the_learner_speaks_to_a_restarted_server(servers, tmp_path):
    config = make_config(str(tmp_path / "run"))
    first = servers.start(config, "--run-id", "run")
    learner = servers.learner(first.address)
    attach(learner)
    first.process.kill()
    first.process.wait()
    second = servers.start(config, "--run-id", "run")
    learner.confirm("line-a")
    assert servers.generator(second.address).hello(10.0, "fake").run_id == "run"


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
        server = threading.Thread(target=answer_twice_and_leave, args=(socket, context))
        server.start()
        client = Connection(address, "client")
        try:
            for _ in range(2):
                request_id = client.post(Ping())
                deadline = time.monotonic() + 10.0
                while not any(request.request_id == request_id for request, _ in client.poll(1.0) if request):
                    assert time.monotonic() < deadline, "the answer was lost"
        finally:
            client.close()
            server.join()
