"""Workers of an engine as ranks of a collective: threads here, processes of a real engine in ``tests/vllm``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.queue.messages import Announcement
from async_rl.weights.channel.engine_ranks import EngineRanks, HeldByEngine, RankThread
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.receive_buffers import ReceiveBuffers, ReceivedWeights
from async_rl.weights.staging import StagedVersion, Staging
from tests.weights.conftest import ReceiverProcess, a_publisher

DEADLINE_S = 12.0


class Engine:
    """Two workers and the generator's receiver."""

    def __init__(self) -> None:
        self.ranks = EngineRanks(2)
        self.workers = [
            RankThread(worker, order_path=path, report_path=self.ranks.report_path, device=None)
            for worker, path in enumerate(self.ranks.order_paths)
        ]
        self.receiver = Receiver("engine", insecure=False, engine=self.ranks)

    def next(self) -> ReceivedWeights:
        """The next version, activated."""
        deadline = time.monotonic() + DEADLINE_S
        while (received := self.receiver.poll()) is None:
            assert self.receiver.wait(deadline - time.monotonic()), self.receiver.error
        self.receiver.activated(received)
        return received

    def held(self, received: ReceivedWeights) -> list[torch.Tensor]:
        """The tensor "weight" of each worker."""
        assert isinstance(received.tensors, HeldByEngine)
        return [worker.tensors(received.tensors.number)["weight"] for worker in self.workers]

    def close(self) -> None:
        self.receiver.close()
        self.ranks.end()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(Engine()) as engine:
        yield engine


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with a_publisher(DEADLINE_S) as publisher:
        yield publisher


def stage(staging: Staging, version: int) -> StagedVersion:
    return staging.stage("ranks", version, iter([("weight", torch.full((50_000,), float(version)))]))


def announce(publisher: Publisher, staged: StagedVersion) -> Announcement:
    return Announcement("ranks", staged.manifest.version, staged.manifest.digest, publisher.address)


def test_every_worker_receives_what_a_generator_of_one_rank_receives_beside_it(
    engine: Engine, publisher: Publisher, shared_receivers: list[ReceiverProcess]
):
    staging, other = Staging(None, 1 << 16, deadline_s=DEADLINE_S), shared_receivers[0]
    first = stage(staging, 0)
    publisher.publish(first)
    for receiver in (engine.receiver, other):
        receiver.follow(announce(publisher, first))
    other.version(0)
    # The first version is pulled, into the generator's own memory.
    assert torch.equal(engine.next().tensors["weight"], torch.zeros(50_000))
    assert publisher.wait(0, DEADLINE_S, num_members=2)
    for version in range(1, 4):
        publisher.publish(stage(staging, version))
        received = engine.next()
        assert (received.version, received.tensors["weight"].shape) == (version, (50_000,))
        for tensor in engine.held(received):
            assert torch.equal(tensor, torch.full((50_000,), float(version)))
        other.version(version)
        assert publisher.wait(version, DEADLINE_S, num_members=2)
    stats = publisher.stats()
    assert (stats.attempts, stats.pulls, stats.failures) == (3, 2, 0)


def test_a_worker_that_fails_costs_a_pull(engine: Engine, publisher: Publisher, monkeypatch: pytest.MonkeyPatch):
    staging = Staging(None, 1 << 16, deadline_s=DEADLINE_S)
    first = stage(staging, 0)
    publisher.publish(first)
    engine.receiver.follow(announce(publisher, first))
    engine.next()
    assert publisher.wait(0, DEADLINE_S, num_members=1)

    def fail(*_: object) -> None:
        raise WeightsError("no memory in this worker")

    with monkeypatch.context() as patched:
        patched.setattr(engine.workers[1]._receiver, "receive", fail)
        publisher.publish(stage(staging, 1))
        assert torch.equal(engine.next().tensors["weight"], torch.ones(50_000))
    assert publisher.wait(1, DEADLINE_S, num_members=1)
    publisher.publish(stage(staging, 2))
    assert torch.equal(engine.held(engine.next())[0], torch.full((50_000,), 2.0))


def test_nothing_is_received_into_the_engine_while_a_version_is_activated_nor_the_other_way_round():
    buffers, staging = ReceiveBuffers(), Staging(None, 1 << 16, is_pulled=True)
    manifests = [stage(staging, version).manifest for version in range(3)]
    buffers.commit(buffers.reserve(manifests[0]), manifests[0], 0.0)
    handed_out = buffers.newest("ranks")
    assert handed_out is not None
    with pytest.raises(WeightsError, match="the engine took more than 0 s to activate a version"):
        buffers.reserve_engine(0.0)
    buffers.activated(handed_out)
    into_engine = buffers.reserve_engine(0.0)
    assert buffers.newest("ranks") is None
    into_engine.tensors = HeldByEngine(manifests[1], 1)
    held = buffers.commit(into_engine, manifests[1], 0.0)
    # A newer one takes its place, because the engine has room for one.
    again = buffers.reserve_engine(0.0)
    assert buffers.newest("ranks") is None
    buffers.abandon_engine()
    assert buffers.newest("ranks") is None
    buffers.commit(buffers.reserve_engine(0.0), manifests[2], 0.0)
    newest = buffers.newest("ranks")
    assert again is into_engine
    assert newest is not None
    assert newest is not held
    assert newest.version == 2
    # No bytes are here from which a delta could start.
    assert buffers.find(manifests[2].digest) is None
    assert buffers.newest_digest() == manifests[2].digest
