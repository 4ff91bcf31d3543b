"""Generators that pull versions from each other, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

from async_rl.net.keys import ClientKeys
from async_rl.weights.channel.receiver import Receiver
from tests.weights.test_tcp import DEADLINE_S, Plane, a_plane, arrived, assert_same, model, with_keys


@contextmanager
def receivers(plane: Plane, *names: str, keys: ClientKeys | None = None) -> Iterator[list[Receiver]]:
    """Members that joined in this order and have version 0."""
    with ExitStack() as stack:
        staged = plane.publish(0, model(0))
        found: list[Receiver] = []
        for name in names:
            found.append(stack.enter_context(closing(Receiver(name, insecure=False, has_peers=True, keys=keys))))
            found[-1].follow(plane.announcement(staged))
            assert_same(arrived(found[-1], 0), model(0))
            assert plane.publisher.wait(0, DEADLINE_S, num_members=len(found))
        yield found


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_the_second_generator_gets_all_from_the_first_and_the_learner_sends_one_model(tmp_path, is_encrypted: bool):
    options, mine = with_keys(tmp_path, is_encrypted)
    with a_plane(has_peers=True, **options) as plane, receivers(plane, "first", "second", keys=mine) as (first, second):
        plane.publish(1, model(1))
        for receiver in (first, second):
            assert_same(arrived(receiver, 1), model(1))
        assert plane.publisher.wait(1, DEADLINE_S, num_members=2)
        stats = plane.publisher.stats()
    # Two versions, of which the learner sent each once.
    assert stats.pulled_bytes - stats.peer_bytes == stats.peer_bytes > 0
    assert (stats.failures, stats.peer_faults, stats.dropped) == (0, 0, 0)


def test_a_peer_that_sends_one_wrong_bit_is_named_and_the_bytes_come_from_the_learner(caplog):
    with a_plane(has_peers=True) as plane, receivers(plane, "liar") as (liar,):
        lie = max(liar._arrivals._by_memory.values(), key=lambda arrival: len(arrival.memory))
        lie.memory[5] ^= 1
        with closing(Receiver("honest", insecure=False, has_peers=True)) as honest:
            staged = plane.publish(1, model(0))  # the same weights as another version
            honest.follow(plane.announcement(staged))
            assert_same(arrived(honest, 1), model(0))
            assert plane.publisher.wait(1, DEADLINE_S, num_members=2)
            stats = plane.publisher.stats()
            assert 0 < stats.peer_bytes < staged.manifest.size_bytes
        assert (stats.peer_faults, stats.members, stats.dropped) == (1, 2, 0)
        (line,) = [r.getMessage() for r in caplog.records if "sends its weights to no other" in r.getMessage()]
        assert line.startswith("generator liar sends its weights to no other for 32 versions, because generator honest")
        assert "sent wrong bytes: bucket" in line
        # It is asked no more: the next one pulls from the honest one.
        with closing(Receiver("third", insecure=False, has_peers=True)) as third:
            third.follow(plane.announcement(plane.publish(2, model(2))))
            assert_same(arrived(third, 2), model(2))
            assert plane.publisher.wait(2, DEADLINE_S)


def test_deltas_that_are_too_large_for_all_generators_give_way_to_peers():
    # Float32 weights that all change: a delta has 0.56 of the bytes. Five of them are more than two versions.
    named = [{"w": torch.randn(1 << 15, generator=torch.Generator().manual_seed(0))}]
    named.append({"w": named[0]["w"] * (1 + 1e-2 * torch.rand(1 << 15))})
    for num_generators, is_delta in ((2, True), (5, False)):
        with a_plane(has_peers=True, has_deltas=True) as plane, ExitStack() as stack:
            staged = plane.publish(0, named[0])
            for index in range(num_generators):
                receiver = stack.enter_context(closing(Receiver(f"g{index}", insecure=False, has_peers=True)))
                receiver.follow(plane.announcement(staged))
            assert plane.publisher.wait(0, DEADLINE_S, num_members=num_generators)
            before = plane.publisher.stats()
            plane.publish(1, named[1])
            assert plane.publisher.wait(1, DEADLINE_S)
            after = plane.publisher.stats()
        assert (after.peer_bytes == before.peer_bytes) == is_delta
        assert (after.pulled_bytes - before.pulled_bytes < num_generators * staged.manifest.size_bytes) == is_delta
