"""Members that pull slowly, or only say that they pull: what they cost the others, and what is told about them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

from async_rl.net.streams import read_exactly
from async_rl.weights import control
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.control import Heartbeat, Join, PublisherSocket, Pull, parse_channel
from async_rl.weights.manifest import manifest_from_fields
from async_rl.weights.tcp.protocol import make_request
from tests.end_to_end.harness import wait_until
from tests.weights.test_tcp import DEADLINE_S, Plane, a_plane, arrived, assert_same, model


class Puller:
    """A member by hand: it does with its pulls what the test does."""

    def __init__(self, plane: Plane, name: str) -> None:
        address, _ = parse_channel(plane.publisher.address)
        self._socket = PublisherSocket(address, None)
        self.host = address.removeprefix("tcp://").rpartition(":")[0]
        wait_until("the connection", lambda: self._socket.send(Join(name, self.host, [], 1, "", 0)))
        self.pulls: list[Pull] = []

    def say(self, pulled_bytes: int) -> None:
        assert self._socket.send(Heartbeat(pulled_bytes))

    def receive(self) -> list[Pull]:
        """All pulls that it was offered so far."""
        while (message := self._socket.receive()) is not None:
            assert isinstance(message, Pull | control.Ping), message
            self.pulls += [message] if isinstance(message, Pull) else []
        return self.pulls

    def request(self, pull: Pull, window_bytes: int) -> socket.socket:
        """Ask the stream server for the whole version, and read nothing. ``window_bytes``: what the kernel takes."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        connection.connect((self.host, pull.port))
        connection.sendall(
            make_request(pull.token, range(len(manifest_from_fields(pull.manifest).bucket_sizes))).encode()
        )
        return connection

    def close(self) -> None:
        self._socket.leave()


@contextmanager
def pulling(plane: Plane, *names: str) -> Iterator[list[Puller]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Puller(plane, name))) for name in names]


@pytest.mark.parametrize("has_peers", [False, True])
@pytest.mark.parametrize("reads", ["nothing", "a little"])
def test_slow_and_lying_members_keep_the_newest_version_from_nobody(reads: str, has_peers: bool):
    with (
        a_plane(has_peers=has_peers) as plane,
        closing(Receiver("honest", insecure=False)) as honest,
        ExitStack() as stack,
    ):
        honest.follow(plane.announcement(plane.publish(0, model(0))))
        arrived(honest, 0)
        others: list[Puller] = []
        # Each of them begins to pull another version, and goes on, or says so.
        for version in range(12):
            if version < 3:
                (other,) = stack.enter_context(pulling(plane, f"other {version}"))
                others.append(other)
                wait_until("the offer of a pull", other.receive)
                assert other.pulls[0].manifest["version"] == version
                if reads == "a little":
                    connection = stack.enter_context(other.request(other.pulls[0], 1 << 12))
                    read_exactly(connection.recv, 100)
            for number, other in enumerate(others):
                other.say(10_000 * version + number)
            staged = plane.publish(version + 1, model(version + 1))
            assert staged.wait_s < DEADLINE_S / 2
            assert_same(arrived(honest, version + 1), model(version + 1))
        assert len(plane.staging._slots) == 3
        # They pull the newest, or one older version.
        wait_until(
            "pulls of two versions at most",
            lambda: len({other.receive()[-1].manifest["version"] for other in others} | {12}) <= 2,
        )


def test_what_counts_as_pulled_is_what_has_reached_the_member():
    size = 2 << 20
    with a_plane() as plane, pulling(plane, "other") as (other,):
        staged = plane.publish(0, {"w": torch.zeros(size, dtype=torch.uint8)})
        assert staged.manifest.size_bytes == size
        wait_until("the offer of a pull", other.receive)
        (member,) = plane.publisher._scheduler.members.values()
        other.say(1 << 40)
        with other.request(other.pulls[0], 1 << 16) as connection:
            wait_until("what it has read", lambda: member.pulled_bytes)
            # Its kernel has doubled the window. It has read nothing.
            assert member.pulled_bytes <= 2 << 16
            read_exactly(connection.recv, 1 << 20)
            wait_until("what it has read", lambda: member.pulled_bytes >= 1 << 20)
            assert member.pulled_bytes <= (1 << 20) + (2 << 16)
            read_exactly(connection.recv, 1 << 20)
            wait_until("what it has read", lambda: member.pulled_bytes == size)
        # To ask for it again counts once more, for buckets that arrive corrupt.
        for _ in range(4):
            before = member.pulled_bytes
            with other.request(other.pulls[0], 1 << 20) as connection:
                read_exactly(connection.recv, size)
                wait_until("what it has read", lambda before=before: member.pulled_bytes > before or before == 2 * size)
        assert size < member.pulled_bytes <= 2 * size
