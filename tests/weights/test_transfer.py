"""Publisher and receivers in processes of their own, over real sockets and gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from async_rl.errors import AddressError
from async_rl.queue.messages import Announcement
from async_rl.weights import server_process
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.control import CollectiveOffer, Join, PublisherSocket, parse_channel
from async_rl.weights.manifest import digest_bytes
from async_rl.weights.staging import StagedVersion, Staging
from tests.end_to_end.harness import wait_until
from tests.weights.conftest import ReceiverProcess, a_publisher

DEADLINE_S = 12.0
BUCKET_BYTES = 1 << 18


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """About 1.3 MB in four buckets: mixed dtypes, a scalar, an empty one, one larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 999, generator=generator).to(torch.bfloat16),
        "bias": torch.randn(7, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 4),
        "flags": torch.randint(0, 2, (33,), generator=generator).bool(),
        "counts": torch.randint(0, 1 << 40, (11,), generator=generator),
        **{f"layer.{i}": torch.randn(64, 300, generator=generator).to(torch.bfloat16) for i in range(18)},
        "transposed": torch.randn(50, 60, generator=generator).t(),
    }


def digests(named: dict[str, torch.Tensor]) -> dict[str, str]:
    return {n: digest_bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for n, t in named.items()}


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with a_publisher(DEADLINE_S, 100_000) as publisher:
        yield publisher


def staging() -> Staging:
    return Staging(None, BUCKET_BYTES, deadline_s=DEADLINE_S)


def announce(publisher: Publisher, staged: StagedVersion) -> Announcement:
    manifest = staged.manifest
    return Announcement(manifest.lineage, manifest.version, manifest.digest, publisher.address)


def test_every_byte_dtype_and_shape_arrives_version_after_version_over_one_communicator(
    publisher: Publisher, shared_receivers: list[ReceiverProcess]
):
    buffers = staging()
    size_bytes = 0
    for version in range(4):
        named = tensors(version)
        staged = buffers.stage("many", version, iter(named.items()))
        size_bytes = staged.manifest.size_bytes
        assert len(staged.buckets) == 4
        publisher.publish(staged)
        for receiver in shared_receivers if version == 0 else ():
            receiver.follow(announce(publisher, staged))
        for receiver in shared_receivers:
            facts = receiver.version(version)
            assert facts["digest"] == staged.manifest.digest
            assert facts["tensors"] == digests(named)
            assert facts["shapes"] == {name: [str(t.dtype), list(t.shape)] for name, t in named.items()}
        assert publisher.wait(version, DEADLINE_S, num_members=2)
    stats = publisher.stats()
    # Version 0 is pulled, by each for itself; the others are one broadcast each.
    assert (stats.pulls, stats.attempts) == (2, 3)
    assert (stats.failures, stats.dropped, buffers.num_dropped) == (0, 0, 0)
    assert stats.last_transfer_bytes == size_bytes
    assert stats.last_verify_s > 0
    assert stats.pulled_bytes == stats.pulled_full_bytes == 2 * size_bytes


def test_a_bucket_corrupted_in_a_broadcast_is_caught_by_its_digest_and_the_version_pulled(
    publisher: Publisher, shared_receivers
):
    receiver, buffers = shared_receivers[0], staging()
    first = buffers.stage("corrupt", 2, iter(tensors(2).items()))
    publisher.publish(first)
    receiver.follow(announce(publisher, first))
    assert publisher.wait(2, DEADLINE_S, num_members=1)
    receiver.take_fault("corrupt")
    publisher.publish(buffers.stage("corrupt", 3, iter(tensors(3).items())))
    assert receiver.version(3)["tensors"] == digests(tensors(3))
    assert publisher.wait(3, DEADLINE_S, num_members=1)
    stats = publisher.stats()
    assert (stats.corrupt, stats.attempts, stats.pulls) == (1, 1, 2)
    # The epoch is built anew for the next.
    publisher.publish(buffers.stage("corrupt", 4, iter(tensors(4).items())))
    assert receiver.version(4)["tensors"] == digests(tensors(4))
    assert publisher.stats().attempts == 2


@pytest.mark.slow
def test_the_dead_and_the_frozen_delay_the_others_less_than_the_deadline(
    publisher: Publisher, shared_receivers: list[ReceiverProcess], start_receiver: Callable[[str], ReceiverProcess]
):
    killed, frozen = start_receiver("killed"), start_receiver("frozen")
    everyone = [*shared_receivers, killed, frozen]
    buffers = staging()
    first = buffers.stage("faults", 0, iter(tensors(0).items()))
    publisher.publish(first)
    for receiver in everyone:
        receiver.follow(announce(publisher, first))
    for receiver in everyone:
        receiver.version(0)
    assert publisher.wait(0, DEADLINE_S, num_members=4)

    killed.take_fault("kill")
    frozen.take_fault("freeze")
    second = buffers.stage("faults", 1, iter(tensors(1).items()))
    start = time.monotonic()
    publisher.publish(second)
    assert time.monotonic() - start < 0.1
    for receiver in shared_receivers:
        assert receiver.version(1, DEADLINE_S)["tensors"] == digests(tensors(1))
    assert time.monotonic() - start < DEADLINE_S

    # Publishing and staging go on meanwhile, and the two that are left get the next version too.
    third = buffers.stage("faults", 2, iter(tensors(2).items()))
    assert third.wait_s < DEADLINE_S
    publisher.publish(third)
    assert publisher.wait(2, DEADLINE_S, num_members=2)
    assert publisher.stats().members == 2
    assert killed.process.wait(DEADLINE_S) == -9


def test_an_announced_digest_that_differs_from_the_offered_one_is_refused(publisher: Publisher, shared_receivers):
    receiver = shared_receivers[0]
    staged = staging().stage("forged", 5, iter(tensors(5).items()))
    publisher.publish(staged)
    receiver.follow(Announcement("forged", 5, "0" * 32, publisher.address))
    wait_until("the refusal", lambda: publisher.wait(5, 0.05, num_members=1) or publisher.stats().corrupt)
    assert publisher.stats().pulled_bytes == 0


def test_listening_beyond_loopback_is_refused_unless_insecure():
    with pytest.raises(AddressError, match="--insecure"):
        Publisher("10.0.0.1", deadline_s=1, insecure=False)


def test_a_broadcaster_that_dies_again_and_again_is_left_alone_and_all_pull(
    publisher: Publisher, shared_receivers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_process, "MAX_FAILURES", 0)
    receiver, buffers = shared_receivers[0], staging()
    first = buffers.stage("given up", 0, iter(tensors(0).items()))
    publisher.publish(first)
    receiver.follow(announce(publisher, first))
    assert publisher.wait(0, DEADLINE_S, num_members=1)
    collective: Any = publisher._manager._collective
    os.kill(collective._server.pid, signal.SIGKILL)
    wait_until("its end", lambda: publisher.wait(0, 0.05, num_members=9) or not publisher.stats().can_collect)
    for version in (1, 2):
        publisher.publish(buffers.stage("given up", version, iter(tensors(version).items())))
        assert receiver.version(version)["tensors"] == digests(tensors(version))
    assert publisher.wait(2, DEADLINE_S)
    assert (publisher.stats().attempts, publisher.stats().pulls) == (0, 3)


def test_a_generator_that_joins_again_over_another_connection_does_not_compete_with_itself_for_its_device():
    with closing(Publisher("127.0.0.1", deadline_s=DEADLINE_S, insecure=False)) as publisher, ExitStack() as stack:
        publisher._own_offer = CollectiveOffer("gloo", "", ["GPU-0"])
        address, _ = parse_channel(publisher.address)
        for generator, device in (("g", "GPU-1"), ("g", "GPU-1"), ("other", "GPU-1")):
            socket = PublisherSocket(address, None)
            stack.callback(socket.leave)
            joined, deadline = publisher.stats().joined, time.monotonic() + DEADLINE_S
            offer = CollectiveOffer("gloo", "", [device])
            while not socket.send(Join(generator, "127.0.0.1", [offer], 1, "")):
                assert time.monotonic() < deadline
                publisher.wait(0, 0.01)
            while publisher.stats().joined == joined:
                assert time.monotonic() < deadline
                publisher.wait(0, 0.01)
        found = {member.generator[1]: member.can_collect for member in publisher._scheduler.members.values()}
    assert found == {"g": True, "other": False}
