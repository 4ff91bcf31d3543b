"""One generator that serves a version and one that pulls it, over a real socket and without a learner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest
import torch

from async_rl.weights.manifest import LayoutPlan, Manifest, digest_bytes
from async_rl.weights.peer_messages import PeerOffer
from async_rl.weights.receive_buffers import ReceiveBuffer
from async_rl.weights.tcp import peer_pull
from async_rl.weights.tcp.arrivals import Arrival, Arrivals
from async_rl.weights.tcp.peer_pull import PeerPull
from async_rl.weights.tcp.peer_server import PeerServer

DEADLINE_S = 20.0
TOKEN = b"t" * 16


class Pair:
    """A generator that serves a version of two buckets, and another one that pulls it."""

    def __init__(self, key: bytes = b"") -> None:
        plan = LayoutPlan(1 << 10)
        specs = [plan.place(name, "uint8", (1 << 10,)) for name in "ab"]
        self.data = [bytearray([number]) * (1 << 10) for number in (1, 2)]
        digests = tuple(digest_bytes(bytes(data)) for data in self.data)
        self.manifest = Manifest("line", 1, tuple(specs), plan.layout.bucket_sizes, digests)
        self.served, self.pulled = Arrivals(), Arrivals()
        self.server = PeerServer(self.served, "127.0.0.1", None)
        self.server.open_session(TOKEN, key, self.manifest)
        self.buffer = ReceiveBuffer([])
        self.buffer.fit(self.manifest)
        offer = PeerOffer("peer", "127.0.0.1", self.server.port, TOKEN, key, 2)
        self.pull = PeerPull(offer, self.manifest, self.buffer, self.pulled, lambda _: None)
        self.thread = threading.Thread(target=self.pull.run, args=([0, 1],))

    def receiving(self, bucket: int) -> AbstractContextManager[Arrival]:
        return self.served.receiving((0, bucket), self.manifest.bucket_digests[bucket], memoryview(self.data[bucket]))

    def has(self, bucket: int, data: bytes) -> bool:
        return self.buffer.buckets[bucket].numpy().tobytes() == data


@contextmanager
def a_pair(key: bytes = b"") -> Iterator[Pair]:
    pair = Pair(key)
    with closing(pair.server):
        yield pair
        pair.thread.join(DEADLINE_S)
        assert not pair.thread.is_alive()


@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_what_has_arrived_is_passed_on_before_the_bucket_is_complete(monkeypatch: pytest.MonkeyPatch, key: bytes):
    for module in ("peer_pull", "peer_server"):
        monkeypatch.setattr(f"async_rl.weights.tcp.{module}.RECORD_BYTES", 256)
    with a_pair(key) as pair:
        with pair.receiving(0) as arrival:
            pair.thread.start()
            arrival.advance(512)
            onward = pair.pulled.find(pair.manifest.bucket_digests[0], DEADLINE_S)
            assert onward is not None
            assert onward.wait(512, DEADLINE_S)
            assert (onward.filled, onward.is_valid) == (512, None)
            arrival.advance(512)
            arrival.end(is_valid=True)
        assert onward.wait_for_end(DEADLINE_S)
        with pair.receiving(1) as arrival:
            arrival.end(is_valid=True)
    assert pair.pull.result.failure == ""
    assert pair.has(0, b"\1" * 1024)
    assert pair.has(1, b"\2" * 1024)
    assert pair.pull.result.wire_bytes == 2048 + (8 * 16 if key else 0)


def test_a_bucket_that_the_peer_itself_received_wrong_begins_again_and_nobody_is_blamed():
    with a_pair() as pair:
        pair.data[0][7] = 9
        with pair.receiving(0) as arrival:
            arrival.advance(1024)
            pair.thread.start()
            onward = pair.pulled.find(pair.manifest.bucket_digests[0], DEADLINE_S)
            assert onward is not None
            assert onward.wait(1024, DEADLINE_S)
            arrival.end(is_valid=False)
        pair.data[0][7] = 1
        for bucket in range(2):
            with pair.receiving(bucket) as arrival:
                arrival.end(is_valid=True)
    assert (pair.pull.result.failure, pair.pull.result.wire_bytes) == ("", 3 * 1024)
    assert pair.has(0, b"\1" * 1024)


def test_a_peer_whose_memory_has_another_version_by_now_says_so_and_is_not_blamed():
    with a_pair() as pair:
        with pair.receiving(0) as arrival:
            arrival.end(is_valid=True)
        newer = Manifest("line", 2, pair.manifest.tensors, pair.manifest.bucket_sizes, ("x", "y"))
        pair.server.open_session(b"n" * 16, b"", newer)
        pair.thread.start()
    assert pair.pull.result.failure.endswith("does not have version 1 any more")
    assert not pair.pull.result.is_faulty
    assert pair.buffer.digests == [pair.manifest.bucket_digests[0], ""]


def test_bytes_that_are_overwritten_while_they_are_sent_are_not_confirmed():
    with a_pair() as pair:
        with pair.receiving(0) as first:
            first.end(is_valid=True)
        found = pair.served.find(pair.manifest.bucket_digests[0], 0)
        assert found is first
        with pair.served.receiving((0, 0), "another digest", memoryview(pair.data[0])):
            assert first.is_valid is False
        assert pair.served.find(pair.manifest.bucket_digests[0], 0) is None
        pair.thread.start()
        for bucket in range(2):
            with pair.receiving(bucket) as arrival:
                arrival.end(is_valid=True)
    assert pair.pull.result.failure == ""


def test_a_peer_that_is_alive_but_sends_too_little_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("async_rl.weights.tcp.peer_server.WAIT_S", 0.05)
    monkeypatch.setattr(peer_pull, "window_s", lambda depth: 0.2 * depth)
    with a_pair() as pair:
        pair.thread.start()
    assert pair.pull.result.failure.endswith("was too slow: 0 bytes in 0.4 s")
    assert pair.pull.result.is_faulty


def test_a_request_without_the_token_of_the_learner_gets_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("async_rl.weights.tcp.request_server._SESSION_S", 0.1)
    with a_pair() as pair:
        stranger = PeerOffer("peer", "127.0.0.1", pair.server.port, b"x" * 16, b"", 2)
        pull = PeerPull(stranger, pair.manifest, pair.buffer, Arrivals(), lambda _: None)
        result = pull.run([0])
        assert result.wire_bytes == 0
        assert "closed the connection" in result.failure or "reset" in result.failure
        for bucket in range(2):
            with pair.receiving(bucket) as arrival:
                arrival.end(is_valid=True)
        pair.thread.start()
    assert torch.equal(pair.buffer.buckets[1], torch.full((1024,), 2, dtype=torch.uint8))
