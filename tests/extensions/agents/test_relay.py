"""The relay: who gets which session, what strangers can't do, and when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rl.config.config import Config
from async_rl.errors import AddressError, ConfigError
from async_rl.extensions.agents.relay import messages as wire
from async_rl.extensions.agents.relay.server import MAX_UNSENT_BYTES, Pairing, Relay, run_relay
from async_rl.run.directory import RunDir
from tests.extensions.agents.programs import a_relay
from tests.ports import free_address

DEADLINE_MS = 30_000


def test_sessions_and_programs_meet_in_their_order_and_once():
    pairing = Pairing()
    assert pairing.want(7, wire.Want(1, 20.0), 0.0) == []
    assert pairing.want(8, wire.Want(1, 20.0), 1.0) == []
    assert pairing.offer(3, wire.Offer("a", b"A")) == [(3, 7, wire.Taken("a")), (7, 3, wire.Session(1, "a", b"A"))]
    assert pairing.expire(20.5) == []  # the want of 7 is answered
    assert pairing.expire(21.0) == [(8, wire.RELAY, wire.NoSession(1))]
    assert [pairing.offer(3, wire.Offer(key, b"")) for key in "bc"] == [[], []]
    pairing.withdraw(3, "b")
    assert pairing.want(8, wire.Want(2, 0.0), 22.0) == [(3, 8, wire.Taken("c")), (8, 3, wire.Session(2, "c", b""))]
    # What has gone offers and wants nothing.
    assert pairing.offer(3, wire.Offer("d", b"")) == []
    pairing.forget(3)
    assert pairing.want(7, wire.Want(3, 20.0), 23.0) == []
    pairing.forget(7)
    assert pairing.offer(4, wire.Offer("e", b"")) == []


class Client:
    """A connection that says what it likes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, role: Any = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.connect(address)
        self._decoder: Any = wire.FOR_PROXY if role == "proxy" else wire.FOR_FRONT
        if role is not None:
            self.say(wire.RELAY, wire.Hello(role))

    def say(self, to: int, message: Any) -> None:
        self.socket.send_multipart([wire.pack_number(to), wire.encode(message)])

    def hear(self) -> tuple[int, Any]:
        assert self.socket.poll(DEADLINE_MS), "nothing came"
        sender, body = self.socket.recv_multipart()
        return wire.unpack_number(sender), wire.decode(body, self._decoder)

    def hear_until(self, kind: type) -> tuple[int, Any]:
        while not isinstance((found := self.hear())[1], kind):
            pass
        return found


@contextmanager
def clients(address: str) -> Iterator[Any]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield lambda role=None: Client(context, address, role)
    finally:
        context.destroy(linger=0)


def test_a_message_comes_in_the_name_of_its_sender_and_the_end_of_a_connection_is_told():
    address = free_address()
    with a_relay(address), clients(address) as connect:
        front = connect("front")
        assert front.hear_until(wire.Proxies) == (wire.RELAY, wire.Proxies(0))
        proxy = connect("proxy")  # each has its own connection: told at once, the relay may hear of it first
        assert front.hear_until(wire.Proxies) == (wire.RELAY, wire.Proxies(1))
        front.say(wire.RELAY, wire.Offer("key", b"task"))
        proxy.say(wire.RELAY, wire.Want(5, 20.0))
        number, taken = front.hear()
        sender, session = proxy.hear()
        assert (taken, session) == (wire.Taken("key"), wire.Session(5, "key", b"task"))
        assert number != sender
        proxy.say(sender, wire.End("key"))
        assert front.hear() == (number, wire.End("key"))
        thief = connect("proxy")
        thief.say(sender, wire.Received(1))
        other, message = front.hear_until(wire.Received)
        assert other not in (number, sender)
        assert message == wire.Received(1)
        thief.say(number, wire.Received(1))  # to another proxy
        assert thief.hear() == (number, wire.Gone())
        proxy.socket.close()
        assert front.hear_until(wire.Gone) == (number, wire.Gone())


def test_what_comes_before_the_hello_is_ignored_and_what_is_malformed_ends_the_connection():
    address = free_address()
    with a_relay(address), clients(address) as connect:
        early = connect()
        early.say(wire.RELAY, wire.Offer("early", b""))
        early.say(wire.RELAY, wire.Hello("front"))
        early.hear_until(wire.Proxies)
        front, proxy = connect("front"), connect("proxy")
        front.hear_until(wire.Proxies)
        front.say(wire.RELAY, wire.Offer("key", b""))
        proxy.say(wire.RELAY, wire.Want(1, 20.0))
        _, session = proxy.hear_until(wire.Session)
        assert session.key == "key"
        front.say(wire.RELAY, wire.Withdraw("key"))
        front.socket.send_multipart([b"no number", b"nothing"])
        assert isinstance(proxy.hear_until(wire.Gone)[1], wire.Gone)


@pytest.mark.timeout(120)
def test_a_connection_that_reads_nothing_loses_its_place_and_hurts_nobody():
    address = free_address()
    with a_relay(address), clients(address) as connect:
        front, proxy = connect("front"), connect("proxy")
        front.hear_until(wire.Proxies)
        front.say(wire.RELAY, wire.Offer("key", b""))
        proxy.say(wire.RELAY, wire.Want(1, 20.0))
        slow, _ = front.hear_until(wire.Taken)
        body = bytes(16 << 20)
        front.socket.setsockopt(zmq.SNDHWM, 4)
        for _ in range(MAX_UNSENT_BYTES // len(body) + 16):
            front.socket.send_multipart([wire.pack_number(slow), body])
        assert front.hear_until(wire.Gone) == (slow, wire.Gone())


def config_of(run_dir: str, relay: str = "") -> Config:
    raw: dict[str, Any] = {"run": {"dir": run_dir}, "model": {"path": "m"}, "sampling": {"max_new_tokens": 4096}}
    serve = {"generator": {"serve": True}, "environment": {"relay": relay}}
    return Config.model_validate({**raw, **(serve if relay else {})})


def test_an_address_in_use_and_a_config_without_a_relay_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("async_rl.extensions.agents.relay.server._BIND_LIMIT_S", 0.0)
    address = free_address()
    with a_relay(address), pytest.raises(AddressError, match="can't bind"):
        Relay(address)
    with pytest.raises(ConfigError, match=r"environment\.relay: expected the address"):
        run_relay(config_of("r"), insecure=False)
    with pytest.raises(AddressError, match=r"environment\.relay: .* make keys"):
        run_relay(config_of("r", "tcp://192.0.2.1:5560"), insecure=False)


def test_a_relay_ends_with_its_run_and_not_with_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # it runs in a thread here
    run_dir = RunDir(tmp_path)
    run_dir.mark_finished({})
    address = free_address()
    config = config_of(str(tmp_path), address)
    thread = threading.Thread(target=run_relay, args=(config,), kwargs={"insecure": False}, daemon=True)
    thread.start()
    with clients(address) as connect:
        proxy = connect("proxy")
        proxy.say(wire.RELAY, wire.Want(1, 0.0))
        assert proxy.hear() == (wire.RELAY, wire.NoSession(1))
        run_dir.mark_finished({"again": True})
        thread.join(30)
        assert not thread.is_alive()
        assert type(proxy.hear()[1]).__name__ == "Finished"
