"""``tcp``: publisher, its server process and receivers; receivers are threads here, but for those that are killed."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.errors import WireError
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.net.streams import MAX_UNAUTHENTICATED_OF_ADDRESS
from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.receive_buffers import ReceivedWeights
from async_rl.weights.staging import StagedVersion, Staging
from async_rl.weights.tcp import receiver as tcp_receiver
from async_rl.weights.tcp import request_server
from async_rl.weights.tcp.protocol import HEADER_BYTES, make_request, read_header, read_items
from async_rl.weights.tcp.sender import StreamSender, StreamServerProcess
from async_rl.weights.tcp.server import StreamServer

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


def deliver(plane: Plane, receiver: Receiver, version: int, named: dict[str, torch.Tensor]) -> StagedVersion:
    """Publish a version, and look at every byte of it in the receiver."""
    staged = plane.publish(version, named)
    receiver.follow(plane.announcement(staged))
    assert_same(arrived(receiver, version), named)
    assert plane.publisher.wait(version, DEADLINE_S)
    return staged


@contextmanager
def a_plane(**options) -> Iterator[Plane]:
    settings = {"deadline_s": DEADLINE_S, "insecure": False, "transport": "tcp", "has_deltas": False, **options}
    with closing(Publisher("127.0.0.1", **settings)) as publisher:
        yield Plane(publisher, Staging(None, BUCKET_BYTES, deadline_s=DEADLINE_S, is_pulled=True, min_versions=2))


def with_keys(directory: Path, is_encrypted: bool) -> tuple[dict[str, Any], ClientKeys | None]:
    """What a plane and a receiver need for encrypted weights, or for those without keys."""
    if not is_encrypted:
        return {}, None
    make_keys(directory / "keys")
    options = {"keys": ServerKeys.ephemeral(directory / "keys"), "is_encrypted": True}
    return options, ClientKeys.load(directory / "keys" / "client.key")


def stream_server(plane: Plane) -> StreamServerProcess:
    assert isinstance(plane.publisher._pull, StreamSender)
    return plane.publisher._pull._server


def arrived(receiver: Receiver, version: int) -> ReceivedWeights:
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


def assert_same(staged: ReceivedWeights, named: dict[str, torch.Tensor]) -> None:
    assert {name: t.dtype for name, t in staged.tensors.items()} == {name: t.dtype for name, t in named.items()}
    for name, tensor in named.items():
        assert torch.equal(staged.tensors[name], tensor), name


def test_weights_travel_over_the_ports_that_the_user_opened_also_after_a_restart_of_the_stream_server():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        ports = (busy.getsockname()[1], 0, 0)
        with a_plane(ports=ports) as plane:
            control, stream = plane.publisher.ports
            assert busy.getsockname()[1] not in (control, stream)
            assert plane.publisher.address.startswith(f"tcp://127.0.0.1:{control}")
            with closing(Receiver("g", insecure=False)) as receiver:
                deliver(plane, receiver, 1, {"w": torch.arange(1000.0)})
                os.kill(stream_server(plane).pid, signal.SIGKILL)
                deliver(plane, receiver, 2, {"w": torch.arange(1000.0) + 1})
                assert plane.publisher.ports == (control, stream)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_every_byte_arrives_unencrypted_and_encrypted(tmp_path, is_encrypted: bool):
    options, mine = with_keys(tmp_path, is_encrypted)
    with a_plane(**options) as plane, closing(Receiver("g", insecure=False, keys=mine)) as receiver:
        first = deliver(plane, receiver, 0, model(0))
        deliver(plane, receiver, 1, model(1))
        stats = plane.publisher.stats()
    assert (stats.pulls, stats.failures, stats.attempts) == (2, 0, 0)
    # A record of up to 256 KiB is 16 bytes longer when it is encrypted; every bucket here is one record.
    tags = 16 * len(first.buckets) if is_encrypted else 0
    assert stats.pulled_bytes == 2 * (first.manifest.size_bytes + tags)


def test_a_generator_that_uses_the_id_of_another_does_not_take_its_place(tmp_path):
    make_keys(tmp_path / "keys", ["honest", "impostor"])
    with a_plane(keys=ServerKeys.load(tmp_path / "keys"), is_encrypted=True) as plane, ExitStack() as stack:
        receivers = []
        for version, name in enumerate(("honest", "impostor")):
            keys = ClientKeys.load(tmp_path / "keys" / f"{name}.key")
            receivers.append(stack.enter_context(closing(Receiver("g", insecure=False, keys=keys))))
            staged = plane.publish(version, model(version))
            receivers[-1].follow(plane.announcement(staged))
            assert plane.publisher.wait(version, DEADLINE_S, num_members=version + 1)
        stats = plane.publisher.stats()
    assert (stats.members, stats.joined, stats.dropped) == (2, 2, 0)


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
        before = plane.publisher.stats().pulled_bytes
        for version in range(1, 4):
            plane.publish(version, weights[version])
            assert_same(arrived(receivers[0], version), weights[version])
            assert plane.publisher.wait(version, DEADLINE_S)
        after = plane.publisher.stats().pulled_bytes
        link = (after - before) / 3
        # One in a hundred elements moved: a gap and its difference, about 4 bytes of 400 (bfloat16: 3 of 200).
        assert link < 0.05 * full
        # The generator that was away still holds version 0: it reports that when it joins, and gets three links.
        rejoined = stack.enter_context(closing(Receiver("lagging", insecure=False)))
        rejoined._buffers = receivers[1]._buffers
        rejoined._worker._buffers = receivers[1]._buffers
        last = plane.publish(4, weights[4])
        rejoined.follow(plane.announcement(last))
        assert_same(arrived(rejoined, 4), weights[4])
        assert plane.publisher.wait(4, DEADLINE_S, num_members=2)
        stats = plane.publisher.stats()
    assert 2 * link < stats.pulled_bytes - after - link < 0.2 * full
    assert stats.corrupt == 0
    assert 0 < stats.delta_bytes < 0.05 * full
    assert stats.pulled_bytes < stats.pulled_full_bytes / 2


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_byte_changed_on_the_way_is_detected_reported_and_requested_again(
    tmp_path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
):
    receive, num_received = tcp_receiver._Answer._receive, 0

    def faulty(self, into):
        nonlocal num_received
        receive(self, into)
        num_received += 1
        if num_received == 2:
            into[0] ^= 1

    monkeypatch.setattr(tcp_receiver._Answer, "_receive", faulty)
    options, mine = with_keys(tmp_path, is_encrypted)
    with a_plane(**options) as plane, closing(Receiver("g", insecure=False, keys=mine)) as receiver:
        staged = deliver(plane, receiver, 0, model(0))
        # Encrypted it is all buckets but the first: nothing after a changed record on a connection can be trusted.
        num_corrupt = len(staged.buckets) - 1 if is_encrypted else 1
        stats = plane.publisher.stats()
        assert stats.corrupt == num_corrupt
        if not is_encrypted:
            assert stats.pulled_bytes - staged.manifest.size_bytes == staged.manifest.bucket_sizes[1]


def test_weights_that_never_match_fail_and_say_so(monkeypatch: pytest.MonkeyPatch):
    read = tcp_receiver._Answer.read
    monkeypatch.setattr(tcp_receiver._Answer, "read", lambda self, into, *_: read(self, into, None))
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        staged = plane.publish(0, model(0))
        receiver.follow(plane.announcement(staged))
        deadline = time.monotonic() + DEADLINE_S
        while plane.publisher.stats().dropped == 0:
            assert time.monotonic() < deadline
            receiver.wait(0.05)
        assert "do not match their digests" in plane.publisher.stats().last_drop
        assert "after 4 requests" in plane.publisher.stats().last_drop
        assert receiver.poll() is None


def test_a_pull_that_breaks_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch):
    requests: list[tuple[int, ...]] = []
    make, read, num_read = tcp_receiver.make_request, tcp_receiver._Answer.read, 0

    def noted(token, items):
        requests.append(tuple(items))
        return make(token, items)

    def breaks_off(self, into, hasher, _=None):
        nonlocal num_read
        num_read += 1
        if num_read == 2:
            raise ConnectionError("the line broke")
        read(self, into, hasher)

    monkeypatch.setattr(tcp_receiver, "make_request", noted)
    monkeypatch.setattr(tcp_receiver._Answer, "read", breaks_off)
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        sizes = deliver(plane, receiver, 0, model(0)).manifest.bucket_sizes
        everything = tuple(range(len(sizes)))
        assert requests == [everything, everything[1:]]
        assert plane.publisher.stats().pulled_bytes == sum(sizes[1:])
        assert plane.publisher.stats().dropped == 0


def test_the_token_is_checked_before_the_items_of_a_request_are_read():
    header = make_request(bytes(16), [0] * (1 << 20)).encode()[:HEADER_BYTES]
    with a_plane() as plane, closing(Receiver("g", insecure=False)) as receiver:
        deliver(plane, receiver, 0, model(0))
        port = stream_server(plane).port
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
            connection.sendall(header)
            # None of the 4 MiB of item numbers comes: the server ends it by the token alone.
            assert connection.recv(1) == b""


def test_a_request_for_more_items_than_its_session_has_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(make_request(bytes(16), [0, 1, 2]).encode())
        header = read_header(theirs.recv)
        assert header is not None
        with pytest.raises(WireError, match="at most 2 items of the weights, got one for 3"):
            read_items(theirs, header, 2)


@pytest.mark.slow
def test_idle_connections_shut_nobody_out():
    with a_plane() as plane, ExitStack() as opened:
        early, late = (opened.enter_context(closing(Receiver(name, insecure=False))) for name in ("early", "late"))
        deliver(plane, early, 0, model(0))
        address = ("127.0.0.1", stream_server(plane).port)
        peers = [
            opened.enter_context(socket.create_connection(address, DEADLINE_S))
            for _ in range(2 * MAX_UNAUTHENTICATED_OF_ADDRESS)
        ]
        # The first half made room for the second.
        for peer in peers[:MAX_UNAUTHENTICATED_OF_ADDRESS]:
            assert peer.recv(1) == b""
        deliver(plane, late, 1, model(1))
        # The others have sent no header in time, however long they would wait.
        assert peers[-1].recv(1) == b""


def test_accept_outlives_a_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_server, "_FULL_S", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    failures = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, None, errno.EBADF]

    class Listener:
        def accept(self) -> tuple[socket.socket, object]:
            failure = failures.pop(0)
            if failure is not None:
                raise OSError(failure, os.strerror(failure))
            return listener.accept()

    learner, other = socket.socketpair()
    with listener, ours, learner, other, pytest.raises(OSError, match="Bad file descriptor"):
        StreamServer(learner)._requests.accept(Listener())  # pyright: ignore[reportArgumentType]
    assert failures == []


def test_a_low_limit_on_open_files_leaves_a_quarter_for_connections_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(request_server, "raise_descriptor_limit", lambda: 64)
    learner, other = socket.socketpair()
    with learner, other, socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as opened:
        address = listener.getsockname()
        threading.Thread(target=StreamServer(learner)._requests.accept, args=(listener,), daemon=True).start()
        peers = [opened.enter_context(socket.create_connection(address, DEADLINE_S)) for _ in range(17)]
        assert peers[16].recv(1) == b""
        peers[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            peers[0].recv(1)
        opened.enter_context(socket.create_connection(address, DEADLINE_S)).recv(1)
    (line,) = [record.getMessage() for record in caplog.records if "open files" in record.getMessage()]
    assert line == (
        "closed a connection for weights: all 16 are in use; raise the limit on open files (ulimit -n), which is 64"
    )
