"""Why there is no connection: every cause reads differently, over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.net.link import LOST_AFTER_S, Link, why_unreachable
from tests.ports import free_port

DEADLINE_S = 30.0


@contextmanager
def client(address: str, keys: ClientKeys | None = None) -> Iterator[Link]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = 0
        made.setsockopt(zmq.RECONNECT_IVL, 20)
        if keys is not None:
            keys.identify(made)
        with closing(Link(made, address, "the queue server", "" if keys is None else keys.public.decode())) as link:
            made.connect(address)
            yield link


@contextmanager
def server(keys: ServerKeys | None = None, port: int = 0) -> Iterator[str]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.ROUTER)
    made.linger = 0
    guard = None if keys is None else keys.guard(made, context, keys.allow_list())
    bound = port or made.bind_to_random_port("tcp://127.0.0.1")
    if port:
        made.bind(f"tcp://127.0.0.1:{port}")
    try:
        yield f"tcp://127.0.0.1:{bound}"
    finally:
        made.close()
        if guard is not None:
            guard.stop()
        context.term()


def update_until(link: Link, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, link.trouble
        link.update()
        time.sleep(0.01)


def wait_trouble(link: Link, said: str) -> None:
    """Wait until the trouble is as ``said``: a handshake that takes long reads as a silent server before."""
    update_until(link, lambda: said in link.trouble)
    assert not link.is_connected


def wait_connected(link: Link) -> None:
    update_until(link, lambda: link.is_connected)
    assert (link.trouble, link.lost_s) == ("", 0.0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "other")
    return tmp_path


def test_a_port_where_nothing_listens_and_then_a_server():
    port = free_port()
    with client(f"tcp://127.0.0.1:{port}") as link:
        wait_trouble(link, f"nothing listens at 127.0.0.1:{port} (connection refused)")
        with server(port=port):
            wait_connected(link)
        update_until(link, lambda: link.lost_s)
        assert link.lost_s < LOST_AFTER_S
        assert link.trouble == "", "a short interruption needs no explanation"


def test_a_name_that_nobody_knows():
    with client("tcp://nosuch.invalid:5555") as link:
        wait_trouble(link, "the host name 'nosuch.invalid' of the queue server can't be resolved")


def test_a_process_that_accepts_connections_and_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as mute, client(f"tcp://127.0.0.1:{mute.getsockname()[1]}") as link:
        wait_trouble(link, "accepts connections, but does not answer")


def test_keys_that_do_not_fit(keys: Path):
    ours, theirs = ClientKeys.load(keys / "keys/client.key"), ClientKeys.load(keys / "other/client.key")
    with server(ServerKeys.load(keys / "keys")) as address:
        with client(address, ours) as link:
            wait_connected(link)
        with client(address) as link:
            wait_trouble(link, "it has keys and this client has none")
        with client(address, theirs) as link:
            link.new_key_s = 2 * LOST_AFTER_S
            wait_trouble(link, "has another server key than this client's key file")
            assert link.lost_s > link.new_key_s, "clients of a server with a new key hear of it somewhat later"
        with client(address, theirs.for_server(ours.server)) as link:
            wait_trouble(link, f"refuses the key of this client, {theirs.public.decode()}")
            with (keys / "keys/allowed.txt").open("a") as allowed:
                allowed.write(f"{theirs.public.decode()} late\n")
            wait_connected(link)
    with server() as address, client(address, ours) as link:
        wait_trouble(link, "has no keys, but this client has")


def test_a_firewall_that_drops_packets_is_named_with_its_port(monkeypatch: pytest.MonkeyPatch):
    def drop(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", drop)
    said = why_unreachable("the queue server", "10.0.0.1", 5555)
    assert "no answer from 10.0.0.1:5555 in 3 s" in said
    assert "open port 5555 on the machine of the queue server" in said
    said = why_unreachable("the learner", "10.0.0.1", 5556, to_open="open the ports 5556 and 5557")
    assert "no answer from 10.0.0.1:5556 in 3 s" in said
    assert "open the ports 5556 and 5557 on the machine of the learner" in said
