"""Limits on a ROUTER socket's connections, over real sockets: who is closed, who stays, what is left for files."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from async_rl.net import connections
from async_rl.net.connections import MAX_CONNECTIONS, RouterConnections, most_connections
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.net.streams import UnauthenticatedPeers, raise_descriptor_limit

DEADLINE_S = 20.0
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@dataclass
class Router:
    """A ROUTER socket with its connections, and clients of it."""

    socket: zmq.Socket[bytes]
    connections: RouterConnections
    port: int
    opened: ExitStack

    def peer(self) -> socket.socket:
        """A connection that sends nothing by itself."""
        return self.opened.enter_context(socket.create_connection(("127.0.0.1", self.port), DEADLINE_S))

    def client(self, keys: ClientKeys | None = None) -> zmq.Socket[bytes]:
        client = self.opened.enter_context(self.socket.context.socket(zmq.DEALER))
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RECONNECT_IVL, 60_000)
        if keys is not None:
            keys.identify(client)
        client.connect(f"tcp://127.0.0.1:{self.port}")
        return client

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            self.socket.poll(10)
            self.connections.check()

    def receive(self) -> bool:
        """Wait for one message. Whether its connection was admitted."""
        self.until(lambda: bool(self.socket.poll(0)))
        return self.connections.note_message(self.socket.recv_multipart(copy=False)[-1])  # type: ignore[arg-type]


@contextmanager
def a_router(keys: Path | None = None, max_connections: int = MAX_CONNECTIONS) -> Iterator[Router]:
    with zmq.Context() as context, ExitStack() as opened:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        server = None if keys is None else ServerKeys.load(keys)
        allow_list = None if server is None else server.allow_list()
        watched = RouterConnections(router, allow_list=allow_list, max_connections=max_connections)
        guard = None if server is None or allow_list is None else server.guard(router, context, allow_list)
        try:
            yield Router(router, watched, router.bind_to_random_port("tcp://127.0.0.1"), opened)
        finally:
            router.close()
            watched.close()
            if guard is not None:
                guard.stop()


def is_closed(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        while peer.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_the_oldest_of_an_address_makes_room_and_other_addresses_are_left_alone():
    peers: UnauthenticatedPeers[str] = UnauthenticatedPeers(most=3, most_of_address=2)
    assert [peers.add(name, name[0], float(when)) for when, name in enumerate(["a1", "b1", "a2"])] == [[], [], []]
    assert peers.add("a3", "a", 3.0) == ["a1"]
    assert peers.connections() == ["b1", "a2", "a3"]
    # Each address has fewer than two of its own, but there are three already.
    assert peers.add("c1", "c", 4.0) == ["b1"]
    assert (peers.remove("a2"), peers.remove("a2"), len(peers)) == (True, False, 2)
    assert peers.overdue(4.0) == ["a3"]
    assert peers.add("a4", "a", 5.0) == []


def test_descriptors_are_left_for_files():
    # 256 are reserved, 1,100 connections may be accepted unread, 1,024 more be unauthenticated.
    assert most_connections(4096) == 4096 - 256 - 1100 - 1024
    assert most_connections(1 << 20) == 4096
    # A quarter, where there are too few for that.
    assert most_connections(1024) == 256


def test_a_connection_without_a_message_is_closed_in_time_and_one_with_a_message_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "FIRST_MESSAGE_S", 0.2)
    with a_router() as router:
        client, silent, trickling = router.client(), router.peer(), router.peer()
        client.send(b"hello")
        assert router.receive()

        def are_closed() -> bool:
            if not is_closed(trickling):
                trickling.send(b"\xff")
            return is_closed(silent) and is_closed(trickling)

        router.until(are_closed)
        assert router.connections.num_closed == 2
        client.send(b"again")
        assert router.receive()


def test_a_new_connection_takes_the_place_of_the_oldest_that_sent_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MAX_UNAUTHENTICATED_OF_ADDRESS", 2)
    with a_router() as router:
        client = router.client()
        client.send(b"hello")
        assert router.receive()
        first, second, third = router.peer(), router.peer(), router.peer()
        router.until(lambda: is_closed(first))
        client.send(b"still here")
        assert router.receive()
        assert not is_closed(second)
        assert not is_closed(third)


def test_with_keys_a_peer_may_send_a_handshake_and_only_a_client_more(tmp_path: Path):
    make_keys(tmp_path / "keys", ["client"])
    with a_router(tmp_path / "keys") as router:
        client, hostile = router.client(ClientKeys.load(tmp_path / "keys" / "client.key")), router.peer()
        # A command of 512 MiB, as far as its header says.
        hostile.sendall(CURVE_GREETING + b"\x06" + (1 << 29).to_bytes(8, "big") + bytes(5000))
        client.send(bytes(64 << 20))
        router.until(lambda: is_closed(hostile))
        assert router.receive()
        assert router.connections.num_closed == 1


def test_there_are_at_most_so_many_connections():
    with a_router(max_connections=2) as router:
        clients = [router.client() for _ in range(3)]
        admitted = []
        for client in clients:
            client.send(b"hello")
            admitted.append(router.receive())
        assert admitted == [True, True, False]
        assert (router.connections.num_closed, router.connections.num_above) == (1, 1)
        clients[0].close()
        router.until(lambda: len(router.connections._addresses) == 1)
        late = router.client()
        late.send(b"hello")
        assert router.receive()


def test_only_a_connection_to_the_port_is_touched_whoever_has_its_descriptor_by_now():
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    with a_router() as router, ours, theirs, listener, open(os.devnull, "rb") as file:
        other = router.opened.enter_context(socket.create_connection(listener.getsockname()))
        for number in (ours.fileno(), other.fileno(), listener.fileno(), file.fileno(), 10_000):
            # As if libzmq had closed a connection of this descriptor before its begin was read.
            router.connections._add(number)
            router.connections._shut_down(number)
        assert router.connections._addresses == {}
        assert router.connections.num_closed == 0
        ours.send(b"x")
        assert theirs.recv(1) == b"x"


def test_no_more_connections_are_accepted_than_can_be_closed():
    raise_descriptor_limit()
    with a_router() as router:
        before = len(os.listdir("/proc/self/fd"))
        peers = [router.peer() for _ in range(1500)]
        # Nothing reads the monitor's events: 1,100 fit into its queue.
        accepted = len(os.listdir("/proc/self/fd")) - before - len(peers)
        assert accepted <= 1101
        client = router.client()
        client.send(b"hello")
        assert router.receive()
        assert sum(map(is_closed, peers)) >= 1500 - connections.MAX_UNAUTHENTICATED_OF_ADDRESS
