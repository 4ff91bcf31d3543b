"""Who is let in, over real sockets: a server with keys, clients with the right key, a wrong one, or none."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from async_rl.config.config import Config
from async_rl.errors import AddressError, KeyFileError, QueueError
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.net.link import LOST_AFTER_S
from async_rl.net.wire import decode, encode
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.queue.client.connection import Connection
from async_rl.queue.messages import Announcement, LeasesGranted, Ping
from async_rl.queue.server.start import answering_run, ensure_queue
from async_rl.run.queue_files import read_record
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from tests.queue.builders import make_config
from tests.queue.conftest import DEADLINE_S, ROOT, attach, wait_until

SILENCE_S = 0.6
"""So long nothing may come; an answer takes about a millisecond."""


def client_file(directory: Path, name: str = "client") -> ClientKeys:
    return ClientKeys.load(directory / f"{name}.key")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["client", "node7"])
    return tmp_path / "keys"


def config_with(tmp_path: Path, keys: Path, **queue: object) -> Config:
    return make_config(str(tmp_path / "run"), queue={"keys": str(keys), **queue})


@contextmanager
def dealer(address: str, keys: ClientKeys | None) -> Iterator[zmq.Socket[bytes]]:
    """A bare client, to say what no client of ours would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        keys.identify(socket)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def is_answered(address: str, keys: ClientKeys | None, within_s: float) -> bool:
    with dealer(address, keys) as socket:
        socket.send(encode("ping", {"request_id": "r"}))
        return bool(socket.poll(int(within_s * 1000)))


def test_a_run_s_roles_talk_under_their_keys(servers, tmp_path, keys):
    server = servers.start(config_with(tmp_path, keys))
    learner = LearnerQueue(server.address, DEADLINE_S, client_file(keys))
    generator = GeneratorQueue(server.address, "g0", client_file(keys, "node7"))
    try:
        attach(learner)
        assert generator.hello(10.0, "fake").run_id == "run"
        generator.request_leases("line-a", 0, 1, 5.0)
        wait_until(lambda: any(isinstance(event, LeasesGranted) for event in generator.poll(0.5)), "leases")
        assert learner.status()["refused_handshakes"] == 0
    finally:
        generator.close()
        learner.close()


def test_a_generators_key_can_not_speak_for_the_learner(servers, tmp_path, keys):
    server = servers.start(config_with(tmp_path, keys))
    unlisted = LearnerQueue(server.address, DEADLINE_S, client_file(keys, "node7"))
    learner = LearnerQueue(server.address, DEADLINE_S, client_file(keys))
    try:
        with pytest.raises(
            QueueError, match=r"expected 'attach' to be sent with the learner's key \(client\.key\), got .* 'node7'"
        ):
            attach(unlisted)
        attach(learner)
        with pytest.raises(QueueError, match="expected 'finish' to be sent with the learner's key"):
            unlisted.finish("lineage")
        assert unlisted.ping() == "run"
    finally:
        unlisted.close()
        learner.close()


def test_who_is_not_on_the_list_gets_no_answer_and_is_counted(servers, tmp_path, keys):
    server = servers.start(config_with(tmp_path, keys))
    make_keys(tmp_path / "other")
    unlisted, listed = client_file(tmp_path / "other"), client_file(keys)
    assert is_answered(server.address, listed, DEADLINE_S)
    assert not is_answered(server.address, unlisted.for_server(listed.server), SILENCE_S)
    assert not is_answered(server.address, None, SILENCE_S)
    assert not is_answered(server.address, unlisted, SILENCE_S), "it would talk to another server only"
    learner = LearnerQueue(server.address, DEADLINE_S, listed)
    try:
        wait_until(lambda: learner.status()["refused_handshakes"] >= 3, "refused handshakes to be counted")
        assert learner.status()["malformed"] == 0
    finally:
        learner.close()
    server.process.send_signal(signal.SIGTERM)
    assert "refused" in server.process.communicate(timeout=20)[1]


def test_a_client_that_is_added_while_the_server_runs_is_let_in(servers, tmp_path, keys):
    server = servers.start(config_with(tmp_path, keys))
    make_keys(keys, ["late"])
    assert is_answered(server.address, client_file(keys, "late"), DEADLINE_S)


def test_a_client_whose_keys_do_not_fit_is_told_which(servers, tmp_path, keys):
    server = servers.start(config_with(tmp_path, keys))
    with pytest.raises(AddressError, match=r"it has keys and this client has none.*name a key file"):
        servers.generator(server.address).hello(LOST_AFTER_S + SILENCE_S, "fake")
    with pytest.raises(QueueError, match="it has keys and this client has none"):
        servers.learner(server.address, timeout_s=LOST_AFTER_S + SILENCE_S).ping()
    make_keys(tmp_path / "other")
    stranger = client_file(tmp_path / "other")
    for chosen, text in ((stranger, "another server key"), (stranger.for_server(client_file(keys).server), "refuses")):
        generator = GeneratorQueue(server.address, "g1", chosen)
        with pytest.raises(AddressError, match=text):
            generator.hello(LOST_AFTER_S + SILENCE_S, "fake")
        generator.close()


def test_a_key_that_is_listed_while_its_owner_waits_is_accepted(servers, tmp_path, keys):
    """ZeroMQ itself never connects again after a refused key."""
    server = servers.start(config_with(tmp_path, keys))
    make_keys(tmp_path / "other")
    stranger = client_file(tmp_path / "other").for_server(client_file(keys).server)
    client = Connection(server.address, "late", stranger)
    try:
        client.post(Ping())
        wait_until(lambda: not client.poll(0.05) and "refuses the key" in client.link.trouble, "the refusal")
        with (keys / "allowed.txt").open("a") as allowed:
            allowed.write(f"{stranger.public.decode()} late\n")
        assert client.poll(DEADLINE_S)
        assert client.link.trouble == ""
    finally:
        client.close()


def test_only_with_keys_does_a_server_bind_beyond_loopback(servers, tmp_path, keys):
    open_address = {"address": "tcp://0.0.0.0:0", "advertise": "tcp://127.0.0.2:0"}
    process = servers.spawn(config_with(tmp_path, keys, **open_address))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "queue.advertise: expected an address by which other machines reach this machine" in errors
    open_address["advertise"] = "tcp://192.0.2.2:0"
    server = servers.start(config_with(tmp_path, keys, **open_address))
    assert server.address.startswith("tcp://192.0.2.2:")
    bound = server.address.replace("192.0.2.2", "127.0.0.1")
    assert is_answered(bound, client_file(keys), DEADLINE_S)
    process = servers.spawn(make_config(str(tmp_path / "other"), queue=open_address))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "async-rl keys new" in errors


def test_a_server_with_an_unfit_key_file_does_not_start(servers, tmp_path, keys):
    (keys / "queue.key").chmod(0o644)
    process = servers.spawn(config_with(tmp_path, keys))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert f"chmod 600 {keys / 'queue.key'}" in errors


def test_the_learner_starts_and_finds_a_queue_with_its_keys(tmp_path, keys, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_with(tmp_path, keys)
    log = tmp_path / "run" / "logs" / "queue.log"
    address = ensure_queue(config, "run", False, log, command=(sys.executable, "-m", "tests.queue.serve"))
    record = read_record(tmp_path / "run")
    assert record is not None
    try:
        assert answering_run(address, 10.0, client_file(keys)) == "run"
        assert ensure_queue(config, "run", False, log, command=("false",)) == address
    finally:
        os.kill(record.pid, signal.SIGTERM)
        os.waitpid(record.pid, 0)


def test_a_peer_of_too_many_malformed_messages_is_unheard_and_others_are_not(servers, tmp_path, keys):
    limits = {"max_malformed_per_minute": 5}
    server = servers.start(make_config(str(tmp_path / "run"), queue={"keys": str(keys)}, experimental=limits))
    learner = LearnerQueue(server.address, DEADLINE_S, client_file(keys))
    try:
        with dealer(server.address, client_file(keys)) as socket:
            # Five are forgiven, the sixth is answered too; what comes after it is not.
            for _ in range(6):
                socket.send(b"nonsense")
                assert socket.poll(int(DEADLINE_S * 1000))
                assert decode(socket.recv()).fields["kind"] == "wire"
            socket.send(encode("ping", {"request_id": "r"}))
            wait_until(lambda: learner.status()["limited"] == 1, "the message to be dropped")
            assert not socket.poll(0)
        assert learner.status()["malformed"] == 6
    finally:
        learner.close()


def test_a_connection_speaks_for_one_generator(servers, tmp_path):
    server = servers.start(make_config(str(tmp_path / "run")))
    learner = servers.learner(server.address)
    attach(learner)
    with dealer(server.address, None) as socket:

        def hello(name: str) -> tuple[str, str]:
            fields = {"generator_id": name, "host": "h", "backend": "fake", "wait_s": 0.0}
            socket.send(encode("hello", fields))
            assert socket.poll(int(DEADLINE_S * 1000))
            answer = decode(socket.recv_multipart()[0])
            return answer.type, str(answer.fields.get("message", ""))

        assert hello("first") == hello("first") == ("welcome", "")
        assert hello("second") == (
            "error",
            "expected messages of generator 'first' on this connection, got one of 'second'; open one "
            "connection for each generator",
        )
        assert "length <= 256" in hello("x" * 257)[1]
    assert [known["id"] for known in learner.status()["generators"]] == ["first"]


def test_the_weights_channel_lets_in_the_listed_only(tmp_path, keys):
    publisher = Publisher("127.0.0.1", deadline_s=20.0, insecure=False, keys=ServerKeys.ephemeral(keys))
    receivers = {
        "listed": Receiver("listed", insecure=False, keys=client_file(keys)),
        "keyless": Receiver("keyless", insecure=False),
    }
    make_keys(tmp_path / "other")
    receivers["unlisted"] = Receiver("unlisted", insecure=False, keys=client_file(tmp_path / "other"))
    try:
        for receiver in receivers.values():
            receiver.follow(Announcement("line-a", 0, "digest", publisher.address))
        wait_until(lambda: publisher.stats().joined == 1, "the listed receiver")
        wait_until(lambda: "sends weights with keys" in (receivers["keyless"].error or ""), "the keyless one to say so")
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline:
            receivers["unlisted"].wait(0.1)
        assert publisher.stats().joined == 1
    finally:
        for receiver in receivers.values():
            receiver.close()
        publisher.close()


def test_a_made_up_pair_needs_the_list(tmp_path):
    with pytest.raises(KeyFileError, match=r"allowed\.txt"):
        ServerKeys.ephemeral(tmp_path)
