"""``tcp``: publisher, its server process and receivers; receivers are threads here, but for those that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

from async_rl.errors import AddressError, WireError
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.queue.messages import Announcement
from async_rl.weights import control, push_lines
from async_rl.weights.buffers import StagedWeights
from async_rl.weights.member_socket import MemberSocket
from async_rl.weights.publisher import Publisher
from async_rl.weights.push_lines import PushLines
from async_rl.weights.receiver import Receiver
from async_rl.weights.staging import StagedVersion, Staging
from async_rl.weights.tcp import receiver as tcp_receiver
from async_rl.weights.tcp.protocol import make_request
from tests.weights.conftest import ReceiverProcess

DEADLINE_S = 20.0
BUCKET_BYTES = 1 << 16


def model(seed: int, *, size: int = 50_000) -> dict[str, torch.Tensor]:
    """About 300 KB in five buckets."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(size, generator=generator).to(torch.bfloat16),
        "head": torch.randn(size, generator=generator),
        "flags": torch.randint(0, 2, (33,), generator=generator).bool(),
        "empty": torch.zeros(0, 4),
    }


def nudged(named: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """The same with this share of the elements moved."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(t.shape, generator=generator) < share, t * 1.25, t) if t.is_floating_point() else t
        for name, t in named.items()
    }


class Plane:
    """A learner's side: stages and publishes."""

    def __init__(self, publisher: Publisher, staging: Staging) -> None:
        self.publisher, self.staging, self.lineage = publisher, staging, "line"

    def publish(self, version: int, named: dict[str, torch.Tensor]) -> StagedVersion:
        staged = self.staging.stage(self.lineage, version, iter(named.items()))
        self.publisher.publish(staged)
        return staged

    def announcement(self, staged: StagedVersion) -> Announcement:
        return Announcement(self.lineage, staged.manifest.version, staged.manifest.digest, self.publisher.address)


@contextmanager
def a_plane(**options) -> Iterator[Plane]:
    settings = {"deadline_s": DEADLINE_S, "insecure": False, "transport": "tcp", "has_deltas": False, **options}
    with closing(Publisher("127.0.0.1", **settings)) as publisher:
        yield Plane(publisher, Staging(None, BUCKET_BYTES, deadline_s=DEADLINE_S, is_pulled=True, min_versions=2))


def arrived(receiver: Receiver, version: int) -> StagedWeights:
    """The version, activated."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        receiver.wait(0.1)
        staged = receiver.poll()
        if staged is not None:
            receiver.activated(staged)
            if staged.version == version:
                return staged
    pytest.fail(f"version {version} did not come: {receiver.error}")


def assert_same(staged: StagedWeights, named: dict[str, torch.Tensor]) -> None:
    assert {name: t.dtype for name, t in staged.tensors.items()} == {name: t.dtype for name, t in named.items()}
    for name, tensor in named.items():
        assert torch.equal(staged.tensors[name], tensor), name


@pytest.mark.parametrize("is_sealed", [False, True])
def test_every_byte_arrives_in_the_clear_and_sealed(tmp_path, is_sealed: bool):
    make_keys(tmp_path / "keys")
    keys = ServerKeys.made_up(tmp_path / "keys") if is_sealed else None
    mine = ClientKeys.load(tmp_path / "keys" / "client.key") if is_sealed else None
    with (
        a_plane(keys=keys, is_sealed=is_sealed) as plane,
        closing(Receiver("g", insecure=False, keys=mine)) as receiver,
    ):
        first = plane.publish(0, model(0))
        receiver.follow(plane.announcement(first))
        assert_same(arrived(receiver, 0), model(0))
        plane.publish(1, model(1))
        assert_same(arrived(receiver, 1), model(1))
        assert plane.publisher.wait(1, DEADLINE_S, num_members=1)
        stats = plane.publisher.stats()
    assert (stats.pulls, stats.failures, stats.attempts) == (2, 0, 0)
    # A record of up to 256 KiB is 16 bytes longer when it is sealed; every bucket here is one record.
    seals = 16 * len(first.buckets) if is_sealed else 0
    assert stats.pulled_bytes == 2 * (first.manifest.size_bytes + seals)


def test_only_what_changed_travels_and_a_lagging_generator_catches_up_by_a_chain():
    weights = [model(0)]
    for version in range(1, 5):
        weights.append(nudged(weights[-1], 0.01, version))
    with a_plane(has_deltas=True) as plane, ExitStack() as stack:
        receivers = [stack.enter_context(closing(Receiver(name, insecure=False))) for name in ("steady", "lagging")]
        first = plane.publish(0, weights[0])
        full = first.manifest.size_bytes
        for receiver in receivers:
            receiver.follow(plane.announcement(first))
            arrived(receiver, 0)
        assert plane.publisher.wait(0, DEADLINE_S, num_members=2)
        receivers[1].close()
        before = receivers[0].stats().wire_bytes
        for version in range(1, 4):
            plane.publish(version, weights[version])
            assert_same(arrived(receivers[0], version), weights[version])
            assert plane.publisher.wait(version, DEADLINE_S)
        link = (receivers[0].stats().wire_bytes - before) / 3
        # One in a hundred elements moved: a gap and its difference, about 4 bytes of 400 (bfloat16: 3 of 200).
        assert link < 0.05 * full
        # The one that was away holds version 0 still: it says so when it joins, and gets three links at once.
        rejoined = stack.enter_context(closing(Receiver("lagging", insecure=False)))
        rejoined._buffers = receivers[1]._buffers
        rejoined._transfers._buffers = receivers[1]._buffers
        last = plane.publish(4, weights[4])
        rejoined.follow(plane.announcement(last))
        assert_same(arrived(rejoined, 4), weights[4])
        caught_up = rejoined.stats().wire_bytes
        assert 2 * link < caught_up < 0.2 * full
        assert plane.publisher.wait(4, DEADLINE_S)
        stats = plane.publisher.stats()
    assert stats.corrupt == 0
    assert 0 < stats.delta_bytes < 0.05 * full
    assert stats.pulled_bytes < stats.pulled_full_bytes / 2


def test_weights_that_changed_everywhere_travel_whole():
    with a_plane(has_deltas=True) as plane, closing(Receiver("g", insecure=False)) as receiver:
        first = plane.publish(0, model(0))
        receiver.follow(plane.announcement(first))
        arrived(receiver, 0)
        plane.publish(1, model(1))
        assert_same(arrived(receiver, 1), model(1))
        assert receiver.stats().wire_bytes <= receiver.stats().received_bytes


def test_a_corrupted_bucket_is_asked_for_again_by_itself_and_reported(monkeypatch: pytest.MonkeyPatch):
    read, faults = tcp_receiver._Source.read, [2]

    def faulty(self, into, hasher):
        read(self, into, None)
        if hasher is not None and faults and len(into) > 8:
            faults[0] -= 1
            if faults[0] == 0:
                faults.clear()
                into[7] ^= 1
        if hasher is not None:
            hasher.update(into)

    monkeypatch.setattr(tcp_receiver._Source, "read", faulty)
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        staged = plane.publish(0, model(0))
        receiver.follow(plane.announcement(staged))
        assert_same(arrived(receiver, 0), model(0))
        assert plane.publisher.wait(0, DEADLINE_S, num_members=1)
        assert plane.publisher.stats().corrupt == receiver.stats().corrupt_buckets == 1
        again = receiver.stats().wire_bytes - staged.manifest.size_bytes
        assert again in staged.manifest.bucket_sizes


def test_a_byte_changed_on_the_way_breaks_the_seal_and_is_asked_for_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    receive, faults = tcp_receiver._Source._receive, [2]

    def faulty(self, into):
        receive(self, into)
        if faults:
            faults[0] -= 1
            if faults[0] == 0:
                faults.clear()
                into[0] ^= 1

    monkeypatch.setattr(tcp_receiver._Source, "_receive", faulty)
    make_keys(tmp_path / "keys")
    mine = ClientKeys.load(tmp_path / "keys" / "client.key")
    with (
        a_plane(keys=ServerKeys.made_up(tmp_path / "keys"), is_sealed=True) as plane,
        closing(Receiver("g", insecure=False, keys=mine)) as receiver,
    ):
        staged = plane.publish(0, model(0))
        receiver.follow(plane.announcement(staged))
        assert_same(arrived(receiver, 0), model(0))
        assert plane.publisher.wait(0, DEADLINE_S, num_members=1)
        # The second bucket and all behind it: what follows a broken seal on a connection proves nothing.
        assert plane.publisher.stats().corrupt == len(staged.buckets) - 1


def told(monkeypatch: pytest.MonkeyPatch, kind: type[control.Fetch | control.Go]) -> list[int]:
    """Attempts that members were told of, by such messages, over the control channel."""
    attempts: list[int] = []
    tell = MemberSocket.tell

    def recorded(self, member_id, message):
        if isinstance(message, kind):
            attempts.append(message.attempt)
        return tell(self, member_id, message)

    monkeypatch.setattr(MemberSocket, "tell", recorded)
    return attempts


def test_who_stands_gets_versions_without_being_told_of_them(monkeypatch: pytest.MonkeyPatch):
    fetches = told(monkeypatch, control.Fetch)
    with a_plane() as plane, ExitStack() as stack:
        receivers = [stack.enter_context(closing(Receiver(name, insecure=False))) for name in "ab"]
        first = plane.publish(0, model(0))
        for receiver in receivers:
            receiver.follow(plane.announcement(first))
        for version in range(4):
            if version:
                plane.publish(version, model(version))
            for receiver in receivers:
                assert_same(arrived(receiver, version), model(version))
            assert plane.publisher.wait(version, DEADLINE_S, num_members=2)
        stats = plane.publisher.stats()
    assert fetches == [1, 2]
    assert (stats.pulls, stats.lost, stats.failures) == (8, 0, 0)
    assert stats.pulled_bytes == 8 * first.manifest.size_bytes


def test_who_stood_for_too_long_is_told_over_the_control_channel_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tcp_receiver, "_KEEP_S", 0.05)
    fetches = told(monkeypatch, control.Fetch)
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        receiver.follow(plane.announcement(plane.publish(0, model(0))))
        arrived(receiver, 0)
        assert plane.publisher.wait(0, DEADLINE_S, num_members=1)
        until = time.monotonic() + DEADLINE_S
        while receiver._transfers._stream.standing() is not None:
            assert time.monotonic() < until
            receiver.wait(0.01)
        plane.publish(1, model(1))
        assert_same(arrived(receiver, 1), model(1))
        assert plane.publisher.wait(1, DEADLINE_S, num_members=1)
        assert plane.publisher.stats().failures == 0
    assert len(fetches) == 2


def test_a_corrupted_bucket_of_what_came_by_itself_is_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    receive, pieces = tcp_receiver._Source._receive, []

    def faulty(self, into):
        receive(self, into)
        pieces.append(len(into))
        if len(pieces) == second:
            into[7] ^= 1

    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        staged = plane.publish(0, model(0))
        second = len(staged.buckets) + 2  # of version 1: every bucket here is one piece
        monkeypatch.setattr(tcp_receiver._Source, "_receive", faulty)
        receiver.follow(plane.announcement(staged))
        arrived(receiver, 0)
        assert plane.publisher.wait(0, DEADLINE_S, num_members=1)
        plane.publish(1, model(1))
        assert_same(arrived(receiver, 1), model(1))
        assert plane.publisher.wait(1, DEADLINE_S, num_members=1)
        stats = plane.publisher.stats()
        assert stats.corrupt == receiver.stats().corrupt_buckets == 1
        assert (stats.lost, stats.failures) == (0, 0)
        assert stats.pulled_bytes - stats.pulled_full_bytes in staged.manifest.bucket_sizes


@contextmanager
def a_collective_plane() -> Iterator[tuple[Plane, Receiver]]:
    """Over gloo, with one receiver that holds versions 0 (which it pulled) and 1: their communicator is there."""
    with a_plane(transport="gloo") as plane, closing(Receiver("g", insecure=False)) as receiver:
        plane.staging = Staging(None, BUCKET_BYTES, deadline_s=DEADLINE_S)
        receiver.follow(plane.announcement(plane.publish(0, model(0))))
        for version in range(2):
            if version:
                plane.publish(version, model(version))
            assert_same(arrived(receiver, version), model(version))
            assert plane.publisher.wait(version, DEADLINE_S, num_members=1)
        yield plane, receiver


def test_who_stands_is_told_to_take_part_in_a_collective_where_it_stands(monkeypatch: pytest.MonkeyPatch):
    goes = told(monkeypatch, control.Go)
    with a_collective_plane() as (plane, receiver):
        assert len(goes) == 1
        for version in range(2, 5):
            plane.publish(version, model(version))
            assert_same(arrived(receiver, version), model(version))
            assert plane.publisher.wait(version, DEADLINE_S, num_members=1)
        stats = plane.publisher.stats()
    assert len(goes) == 1
    assert (stats.pulls, stats.attempts, stats.lost, stats.failures) == (1, 4, 0, 0)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_word_whose_line_ends_is_said_again_and_taken_once(is_read: bool, monkeypatch: pytest.MonkeyPatch):
    goes = told(monkeypatch, control.Go)
    send_some, broken = push_lines._send_some, []

    def breaks(connection, parts, most):
        if is_read:
            send_some(connection, parts, most)
        parts.clear()
        if not broken:
            broken.append(True)
            # For this side it has ended, and with it whatever was sent; the other one may have read it.
            connection.shutdown(socket.SHUT_RD if is_read else socket.SHUT_RDWR)

    with a_collective_plane() as (plane, receiver):
        monkeypatch.setattr(push_lines, "_send_some", breaks)
        plane.publish(2, model(2))
        assert_same(arrived(receiver, 2), model(2))
        assert plane.publisher.wait(2, DEADLINE_S, num_members=1)
        assert (plane.publisher.stats().lost, len(goes)) == (1, 2)
        monkeypatch.undo()
        plane.publish(3, model(3))
        assert_same(arrived(receiver, 3), model(3))
        assert plane.publisher.wait(3, DEADLINE_S, num_members=1)
        stats = plane.publisher.stats()
    assert (stats.pulls, stats.attempts, stats.failures, stats.dropped) == (1, 3, 0, 0)


def test_what_came_by_itself_and_is_not_what_was_announced_is_refused():
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        receiver.follow(plane.announcement(plane.publish(0, model(0))))
        arrived(receiver, 0)
        assert plane.publisher.wait(0, DEADLINE_S, num_members=1)
        receiver.follow(Announcement("line", 1, "0" * 32, plane.publisher.address))
        plane.publish(1, model(1))
        until = time.monotonic() + DEADLINE_S
        while plane.publisher.stats().dropped == 0:
            assert time.monotonic() < until
            receiver.wait(0.05)
        assert "announced with digest" in plane.publisher.stats().last_drop
        assert receiver.poll() is None


def test_weights_that_never_match_fail_and_say_so(monkeypatch: pytest.MonkeyPatch):
    read = tcp_receiver._Source.read
    monkeypatch.setattr(tcp_receiver._Source, "read", lambda self, into, _: read(self, into, None))
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        staged = plane.publish(0, model(0))
        receiver.follow(plane.announcement(staged))
        deadline = time.monotonic() + DEADLINE_S
        while plane.publisher.stats().dropped == 0:
            assert time.monotonic() < deadline
            receiver.wait(0.05)
        assert "digest mismatch" in plane.publisher.stats().last_drop
        assert "tried 4 times" in plane.publisher.stats().last_drop
        assert receiver.poll() is None


def test_a_server_that_dies_is_started_again_and_versions_go_on():
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        first = plane.publish(0, model(0))
        receiver.follow(plane.announcement(first))
        arrived(receiver, 0)
        os.kill(plane.publisher._stream.server_pid, signal.SIGKILL)
        plane.publish(1, model(1))
        assert_same(arrived(receiver, 1), model(1))
        assert plane.publisher.wait(1, DEADLINE_S, num_members=1)


def test_what_was_said_by_a_line_that_ended_before_it_was_heard_is_said_again(monkeypatch: pytest.MonkeyPatch):
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        receiver.follow(plane.announcement(plane.publish(0, model(0))))
        arrived(receiver, 0)
        assert plane.publisher.wait(0, DEADLINE_S, num_members=1)
        take, deaf = PushLines._take, threading.Event()

        def ends_first(self, line, request):
            if deaf.is_set():
                return take(self, line, request)
            deaf.set()
            raise WireError("not heard")

        monkeypatch.setattr(PushLines, "_take", ends_first)
        plane.publish(1, model(1))
        assert_same(arrived(receiver, 1), model(1))
        assert plane.publisher.wait(1, DEADLINE_S / 4, num_members=1)
        plane.publish(2, model(2))
        assert_same(arrived(receiver, 2), model(2))
        assert plane.publisher.wait(2, DEADLINE_S, num_members=1)
        assert deaf.is_set()
        assert plane.publisher.stats().dropped == 0


def test_versions_come_over_one_connection_and_over_another_when_that_has_ended(monkeypatch: pytest.MonkeyPatch):
    connections: list[socket.socket] = []
    connect = tcp_receiver._connect

    def recorded(host: str, port: int, deadline: float) -> socket.socket:
        connections.append(connect(host, port, deadline))
        return connections[-1]

    monkeypatch.setattr(tcp_receiver, "_connect", recorded)
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        receiver.follow(plane.announcement(plane.publish(0, model(0))))
        arrived(receiver, 0)
        for version in (1, 2):
            plane.publish(version, model(version))
            assert_same(arrived(receiver, version), model(version))
        # To the server for the first, and to where it stands for the others.
        assert len(connections) == 2
        connections[1].shutdown(socket.SHUT_RDWR)
        plane.publish(3, model(3))
        assert_same(arrived(receiver, 3), model(3))
        assert plane.publisher.wait(3, DEADLINE_S, num_members=1)
        assert len(connections) == 4
        assert plane.publisher.stats().failures == 0


def test_a_stranger_without_a_token_gets_nothing_and_harms_nobody():
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        first = plane.publish(0, model(0))
        receiver.follow(plane.announcement(first))
        arrived(receiver, 0)
        stream = plane.publisher._stream
        ack = control.encode_message(control.Ack(1, 0, first.manifest.digest, 0, 0))
        malformed = (b"GET / HTTP/1.1\r\n" + b"\r\n" * 40, bytes(1 << 17))
        unasked = (make_request(bytes(16), [0]), make_request(bytes(16), []), make_request(bytes(16), [], ack))
        assert stream._lines is not None
        for port in (stream._host.port, stream._lines.port):
            for said in (*malformed, *(request.encode() for request in unasked)):
                with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
                    with contextlib.suppress(ConnectionError):  # it closes before it has read everything
                        connection.sendall(said)
                    with contextlib.suppress(ConnectionResetError):
                        assert connection.recv(1) == b""
        plane.publish(1, model(1))
        assert_same(arrived(receiver, 1), model(1))
        assert plane.publisher.wait(1, DEADLINE_S, num_members=1)
        assert plane.publisher.stats().malformed == 5


def test_a_killed_and_a_frozen_puller_delay_neither_publishing_nor_the_others(
    shared_receivers: list[ReceiverProcess], start_receiver: Callable[[str], ReceiverProcess]
):
    killed, frozen = start_receiver("pull-killed"), start_receiver("pull-frozen")
    weights = {name: torch.randn(500_000) for name in "abcd"}
    with a_plane() as plane:
        plane.lineage = "pulls"
        first = plane.publish(0, weights)
        for receiver, fault in ((killed, "kill"), (frozen, "freeze")):
            receiver.say(fault=fault, on="stream")
            receiver.follow(plane.announcement(first))
        steady = shared_receivers[0]
        steady.follow(plane.announcement(first))
        assert steady.version(0)["digest"] == first.manifest.digest
        for version in range(1, 6):
            start = time.monotonic()
            staged = plane.publish(version, {name: t + version for name, t in weights.items()})
            assert staged.wait_s < 1.0
            assert steady.version(version, DEADLINE_S)["digest"] == staged.manifest.digest
            assert time.monotonic() - start < DEADLINE_S
        assert len(plane.staging._slots) <= 3
        assert killed.process.wait(DEADLINE_S) == -signal.SIGKILL
        # Only its silence ends the frozen one's pull; then nobody is waited for.
        assert plane.publisher.wait(5, DEADLINE_S, num_members=1)
        assert plane.publisher.stats().members == 1


def test_beyond_loopback_the_stream_wants_keys_or_a_trusted_network():
    with pytest.raises(AddressError, match=r"queue\.keys"):
        Publisher("0.0.0.0", deadline_s=1, insecure=False, advertise_host="10.0.0.1", transport="tcp")
