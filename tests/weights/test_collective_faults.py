"""What the others notice when a collective's library fails: nothing but a version that comes by the stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from async_rl.errors import WeightsError
from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.collective.libraries import SUBSTITUTE
from async_rl.weights.collective.protocol import TO_LEARNER, Broadcast, Configure, Connect, Connected, Loaded
from async_rl.weights.collective.receiver import CollectiveReceiver
from async_rl.weights.control import StartCollective
from async_rl.weights.receive_buffers import ReceiveBuffers
from async_rl.weights.server_process import ServerProcess
from async_rl.weights.staging import StagedVersion, Staging
from async_rl.weights.transport import ReceiveOrder
from tests.weights.conftest import ReceiverProcess
from tests.weights.faulty_library import file_of

DEADLINE_S = 6.0
FAULTS = [
    *((f"init:{fault}") for fault in ("progress", "raise", "async")),
    *((f"broadcast:{fault}") for fault in ("raise", "async", "stall")),
]
HANGS = [pytest.param("init:hang", marks=pytest.mark.long), "broadcast:hang"]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNC_RL_FAULTS", str(tmp_path))
    monkeypatch.setenv(SUBSTITUTE, "tests.weights.faulty_library:FaultyLibrary")
    return tmp_path


@pytest.fixture
def publisher(directory: Path) -> Iterator[Publisher]:
    with closing(Publisher("127.0.0.1", deadline_s=DEADLINE_S, insecure=False, chunk_bytes=10_000)) as publisher:
        assert publisher.wait_for_collective(60)
        yield publisher


def num_starts(publisher: Publisher) -> int:
    """How often the broadcaster was started."""
    collective: Any = publisher._manager._collective
    return collective._server.num_starts


class Versions:
    """Stages and publishes versions, and measures for how long the learner would have waited."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._staging = Staging(None, 1 << 16, deadline_s=DEADLINE_S)
        self.longest_s = 0.0

    def publish(self, version: int) -> StagedVersion:
        start = time.monotonic()
        tensor = torch.full((50_000,), float(version))
        staged = self._staging.stage("faults", version, iter([("weight", tensor)]))
        self._publisher.publish(staged)
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        return staged


def joined(publisher: Publisher, versions: Versions, receivers: list[ReceiverProcess]) -> None:
    """Bring version 0, which is pulled, to all receivers, and version 1 by a collective of all."""
    manifest = versions.publish(0).manifest
    for receiver in receivers:
        receiver.follow(Announcement(manifest.lineage, 0, manifest.digest, publisher.address))
    for receiver in receivers:
        receiver.version(0)
    assert publisher.wait(0, DEADLINE_S, num_members=len(receivers))
    versions.publish(1)
    for receiver in receivers:
        receiver.version(1)
    assert publisher.wait(1, DEADLINE_S, num_members=len(receivers))
    assert publisher.stats().attempts == 1


def arm(directory: Path, publisher: Publisher, versions: Versions, who: str, fault: str, extra: Callable) -> None:
    """Inject ``fault`` into ``who``. A fault of ``init`` needs a new communicator, so another receiver joins first."""
    if fault.startswith("init"):
        late = extra("late")
        manifest = versions.publish(2).manifest
        late.follow(Announcement(manifest.lineage, 2, manifest.digest, publisher.address))
        late.version(2)
        assert publisher.wait(2, DEADLINE_S)
    file_of(directory, who).write_text(fault)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["broadcaster", "faulty"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_library_that_fails_costs_the_others_no_more_than_two_deadlines(
    directory: Path, publisher: Publisher, start_receiver: Callable[[str], ReceiverProcess], who: str, fault: str
):
    healthy, faulty = start_receiver("healthy"), start_receiver("faulty")
    versions = Versions(publisher)
    joined(publisher, versions, [healthy, faulty])
    arm(directory, publisher, versions, who, fault, start_receiver)
    start = time.monotonic()
    versions.publish(3)
    for receiver in (healthy, faulty):
        receiver.version(3, 2 * DEADLINE_S)
    assert time.monotonic() - start < 2 * DEADLINE_S
    assert not file_of(directory, who).exists(), "the fault was not injected"
    assert publisher.stats().failures > 0
    # Nobody has died, and the collective works again for the next version.
    versions.publish(4)
    for receiver in (healthy, faulty):
        receiver.version(4, 2 * DEADLINE_S)
    assert (healthy.process.poll(), faulty.process.poll()) == (None, None)
    assert publisher.stats().dropped == 0, publisher.stats().last_drop
    assert versions.longest_s < DEADLINE_S


@pytest.mark.slow
@pytest.mark.parametrize("fault", HANGS)
def test_a_call_that_never_returns_ends_the_broadcaster_and_nobody_else(
    directory: Path, publisher: Publisher, start_receiver: Callable[[str], ReceiverProcess], fault: str
):
    receivers = [start_receiver("one"), start_receiver("two")]
    versions = Versions(publisher)
    joined(publisher, versions, receivers)
    arm(directory, publisher, versions, "broadcaster", fault, start_receiver)
    start = time.monotonic()
    versions.publish(3)
    for receiver in receivers:
        receiver.version(3, 2 * DEADLINE_S)
    while num_starts(publisher) == 1:
        assert time.monotonic() - start < 2 * DEADLINE_S, "the broadcaster was not ended"
        publisher.wait(3, 0.05, num_members=9)
    assert num_starts(publisher) == 2
    assert publisher.wait_for_collective(60)
    num_attempts = publisher.stats().attempts
    versions.publish(4)
    for receiver in receivers:
        receiver.version(4, 2 * DEADLINE_S)
    assert publisher.wait(4, 2 * DEADLINE_S)
    assert publisher.stats().attempts > num_attempts, "the collective did not come back"
    assert versions.longest_s < DEADLINE_S


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*HANGS, "abort:hang"])
def test_a_call_that_never_returns_ends_that_generator_and_nobody_else(
    directory: Path, publisher: Publisher, start_receiver: Callable[[str], ReceiverProcess], fault: str
):
    healthy, faulty = start_receiver("healthy"), start_receiver("faulty")
    versions = Versions(publisher)
    joined(publisher, versions, [healthy, faulty])
    if fault == "abort:hang":
        file_of(directory, "broadcaster").write_text("broadcast:raise")
        file_of(directory, "faulty").write_text(fault)
    else:
        arm(directory, publisher, versions, "faulty", fault, start_receiver)
    start = time.monotonic()
    versions.publish(3)
    healthy.version(3, 2 * DEADLINE_S)
    assert faulty.process.wait(2 * DEADLINE_S - (time.monotonic() - start)) == -9
    versions.publish(4)
    healthy.version(4, 2 * DEADLINE_S)
    assert healthy.process.poll() is None
    assert versions.longest_s < DEADLINE_S
    assert os.listdir(directory) == []


@pytest.mark.slow
def test_a_hundred_failures_leave_no_thread_behind(directory: Path, monkeypatch: pytest.MonkeyPatch):
    buckets = Staging(None, 1 << 16).stage("threads", 0, iter([("weight", torch.zeros(1000))]))
    poller = zmq.Poller()

    def configure() -> None:
        server.send(Configure("gloo", "127.0.0.1", "127.0.0.1", 10.0, None))

    def answer() -> Any:
        assert poller.poll(60_000), "the broadcaster does not answer"
        return server.poll()

    def num_threads() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/task")) for pid in (server.pid, os.getpid())]

    server = ServerProcess("async_rl.weights.collective.server", "the broadcaster", TO_LEARNER, poller, configure)
    server.start()
    monkeypatch.setenv("FAULTY_NAME", "receiver")
    receiver, buffers = CollectiveReceiver(None), ReceiveBuffers()
    counts: list[list[int]] = []
    with closing(server):
        assert isinstance(answer(), Loaded)
        server.map_slot(0, buckets.memory)
        for number in range(105):
            file_of(directory, "broadcaster").write_text("broadcast:raise")
            server.send(Connect(2))
            found = answer()
            server.send(Broadcast(number, 0, 1000, 10.0))
            start = StartCollective(number, number, 1, 2, found.unique_id, 10.0, 10.0, 1000, "gloo", {})
            order = ReceiveOrder(start, buckets.manifest, "127.0.0.1", "127.0.0.1", time.monotonic() + 10.0)
            with pytest.raises(WeightsError):
                receiver.receive(order, buffers.reserve(buckets.manifest), buffers)
            receiver.close()
            assert isinstance(answer(), Connected)
            assert "injected" in answer().error
            counts.append(num_threads())
    # The first ones start threads that stay, such as torch's own.
    assert counts[-1] == counts[4]
