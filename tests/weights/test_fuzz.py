"""Mutated and replayed messages at the two ports of weights. Both go on serving; strangers get no byte of weights."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.net.streams import MAX_UNAUTHENTICATED_OF_ADDRESS, read_exactly
from async_rl.net.wire import encode
from async_rl.weights import control
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.memory import SharedBuckets
from async_rl.weights.tcp.protocol import HEADER_BYTES, TOKEN_BYTES, EndSession, OpenSession, make_request
from async_rl.weights.tcp.sender import StreamServerProcess
from tests.fuzz import CHUNK, FEW, REPLAYED, byte_mutants, chunk_rng, long_chunks
from tests.processes import anonymous_bytes
from tests.queue.mutants import Frames, mutants
from tests.weights.test_control import MESSAGES
from tests.weights.test_tcp import a_plane, arrived, assert_same, model
from tests.weights.test_tcp import stream_server as server_of

DEADLINE_S = 20.0
MAX_GROWTH_BYTES = 64 << 20
NUM_OPEN = 5 * MAX_UNAUTHENTICATED_OF_ADDRESS
"""Connections whose answers have not been read yet: more than the server keeps, so it closes the oldest."""
BUCKETS = (b"abc" * 1000, b"", b"defgh" * 4000)


# The stream server: requests for bytes.


@contextmanager
def stream_server(live: bytes, ended: bytes) -> Iterator[StreamServerProcess]:
    """A server with a session of the token ``live``, and one of ``ended`` that is over."""
    poller, memory = zmq.Poller(), SharedBuckets()
    with closing(StreamServerProcess("127.0.0.1", poller)) as server, closing(memory):
        for bucket in BUCKETS:
            memory.append(len(bucket))[: len(bucket)] = bucket
        server.map_slot(0, memory)
        for token in (live, ended):
            server.send(OpenSession(token, 0, [], b""))
        while not server.is_up:
            assert poller.poll(int(DEADLINE_S * 1000))
            server.receive()
        assert pulled(server.port, make_request(ended, [0, 2]).encode(), 23_000) == BUCKETS[0] + BUCKETS[2]
        server.send(EndSession(ended))
        # The server handles messages in their order: when it knows this session, it has ended the other.
        after = os.urandom(TOKEN_BYTES)
        server.send(OpenSession(after, 0, [], b""))
        assert pulled(server.port, make_request(after, [2]).encode(), len(BUCKETS[2])) == BUCKETS[2]
        yield server
        assert server.num_starts == 1


def pulled(port: int, request: bytes, size: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.sendall(request)
        return read_exactly(connection.recv, size)


def read_all(connection: socket.socket) -> bytes:
    """Everything that comes until the server closes, or everything that has come if ``connection`` does not block."""
    received = b""
    with connection, contextlib.suppress(OSError):
        while chunk := connection.recv(1 << 16):
            received += chunk
    return received


def fuzz_stream(chunks: Sequence[int], size: int = CHUNK) -> None:
    live, ended = os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)
    requests = [
        make_request(token, items).encode()
        for token in (live, ended) for items in ([0, 1, 2], [2], [0, 0], [3, 4, 5], [], [2**32 - 1])
    ]  # fmt: skip
    num_sent = num_answered = growth = 0
    with stream_server(live, ended) as server:
        opened: deque[tuple[bytes, socket.socket]] = deque()

        def finish_oldest() -> None:
            nonlocal num_answered
            request, connection = opened.popleft()
            received = read_all(connection)
            num_answered += bool(received)
            assert not received or request[4 : 4 + TOKEN_BYTES] == live, request[:HEADER_BYTES]

        for number, chunk in enumerate(chunks):
            for request in itertools.islice(byte_mutants(chunk_rng(chunk), requests), size):
                connection = socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)
                opened.append((request, connection))
                with contextlib.suppress(OSError):  # the server has closed it already
                    connection.sendall(request)
                    connection.shutdown(socket.SHUT_WR)
                num_sent += 1
                while len(opened) > NUM_OPEN:
                    finish_oldest()
            assert pulled(server.port, requests[0], 23_000) == b"".join(BUCKETS), f"chunk {chunk}"
            if number == 0:
                growth = -anonymous_bytes(server.pid)
        for _, connection in opened:
            connection.setblocking(False)  # it may wait for a session of an unknown token
        while opened:
            finish_oldest()
        growth += anonymous_bytes(server.pid)
    print(f"{num_sent} requests, {num_answered} answered; memory grew by {growth / 2**20:.1f} MiB")
    assert num_answered > 0.05 * num_sent
    assert growth < MAX_GROWTH_BYTES


def test_mutated_and_replayed_requests_get_no_weights():
    fuzz_stream([0], FEW)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_mutants_leave_the_stream_server_serving(pytestconfig: pytest.Config):
    fuzz_stream(long_chunks(pytestconfig))


# The control channel: messages to the publisher.


def corpus() -> dict[str, Frames]:
    return {type(message).__name__: (encode(type(message).__name__, message),) for message in MESSAGES}


def fuzz_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: Sequence[int], size: int = CHUNK) -> None:
    make_keys(tmp_path / "keys", ["client", "fuzzer"])
    recorded: deque[bytes] = deque(maxlen=50)
    send = control.PublisherSocket.send

    def recording_send(self: control.PublisherSocket, message: control.MemberMessage) -> bool:
        recorded.append(control.encode_message(message))
        return send(self, message)

    monkeypatch.setattr(control.PublisherSocket, "send", recording_send)
    keys = ClientKeys.load(tmp_path / "keys" / "client.key")
    growth, num_sent = 0, 0
    with (
        a_plane(keys=ServerKeys.load(tmp_path / "keys"), is_encrypted=False, deadline_s=5.0) as plane,
        closing(Receiver("honest", insecure=False, keys=keys)) as receiver,
    ):
        receiver.follow(plane.announcement(plane.publish(0, model(0))))
        arrived(receiver, 0)
        for version, chunk in enumerate(chunks, start=1):
            num_sent += size
            send_mutants(plane.publisher.address, tmp_path / "keys" / "fuzzer.key", chunk, size, recorded)
            plane.publish(version, model(0))
            assert_same(arrived(receiver, version), model(0))
            if version == 1:
                growth = -anonymous_bytes(os.getpid())
        growth += anonymous_bytes(os.getpid())
        stats, num_starts = plane.publisher.stats(), server_of(plane).num_starts
    print(f"{num_sent} messages, {stats.malformed} malformed, {stats.joined} joined; memory {growth / 2**20:.1f} MiB")
    assert num_starts == 1
    assert stats.malformed > 0.3 * num_sent
    assert growth < MAX_GROWTH_BYTES


def send_mutants(channel: str, key_file: Path, chunk: int, size: int, recorded: Sequence[bytes]) -> None:
    """Send a chunk over one connection. Read every answer, as a legitimate peer would."""
    address, server_key = control.parse_channel(channel)
    assert server_key is not None
    rng, replays = chunk_rng(chunk), list(recorded)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, int(DEADLINE_S * 1000))
        ClientKeys.load(key_file).for_server(server_key).identify(peer)
        peer.connect(address)
        for frames in itertools.islice(mutants(corpus(), rng.randrange(2**32)), size):
            is_replay = replays and rng.random() < REPLAYED
            peer.send_multipart([rng.choice(replays)] if is_replay else frames)
            while peer.poll(0):
                peer.recv()


def test_mutated_and_replayed_messages_delay_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fuzz_control(tmp_path, monkeypatch, [0], FEW)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_mutants_leave_the_publisher_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
):
    fuzz_control(tmp_path, monkeypatch, long_chunks(pytestconfig))
