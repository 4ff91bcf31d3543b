"""Large groups between a server and clients on one machine: through memory where both can, and never lost or mixed."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from async_rl.errors import WireError
from async_rl.net.wire import Message
from async_rl.queue.arena import Arena, ArenaReader
from async_rl.queue.client.generator_client import GeneratorQueue
from async_rl.queue.client.learner_client import LearnerQueue
from async_rl.queue.messages import Batch, Returned
from async_rl.queue.neighbours import Neighbours, NotSharedError, OutdatedError, address_fields, free_unkept
from async_rl.queue.storage.payloads import MemoryBodies
from async_rl.records import Lease
from tests.queue.builders import all_trained, group, make_config
from tests.queue.conftest import Server, Servers, attach, wait_until
from tests.queue.test_server import events_until, get_leases

TOKENS = 4000
"""Of a rollout, so that a group of two has about 100 KiB."""
SAMPLING = {"group_size": 2, "max_new_tokens": TOKENS, "max_prompt_tokens": 8}


def large_group(lease: Lease, version: int = 0, generator: str = "g0"):
    return group(lease, version, tokens=TOKENS, generator=generator)


def return_large(queue: GeneratorQueue, leases: list[Lease], version: int = 0) -> list[str]:
    for lease in leases:
        queue.return_group(large_group(lease, version, queue.generator_id))
    heard = events_until(queue, Returned, len(leases))
    return [event.verdict for event in heard if isinstance(event, Returned)]


def shared(queue: LearnerQueue) -> dict[str, int]:
    return queue.status()["shared_memory"]


def started(servers: Servers, run_dir: str, *options: str, **queue) -> tuple[Server, LearnerQueue, GeneratorQueue]:
    """A server, and both its clients, which have had the time to share memory."""
    server = servers.start(make_config(run_dir, sampling=SAMPLING, queue=queue), *options)
    learner, generator = servers.learner(server.address), servers.generator(server.address)
    attach(learner)
    generator.hello(10.0, "fake", "host-1")
    agree(learner, generator)
    return server, learner, generator


def agree(learner: LearnerQueue, generator: GeneratorQueue) -> None:
    def both() -> bool:
        generator.poll(0.01)
        return shared(learner).get("clients", 2) == 2

    wait_until(both, "both clients to share memory")


def check_taken(batch: object, positions: list[int]) -> None:
    assert isinstance(batch, Batch)
    assert [taken.prompt.position for taken in batch.groups] == positions
    for taken in batch.groups:
        for rollout in taken.group.rollouts:
            sequence = rollout.sequences[0]
            np.testing.assert_array_equal(sequence.token_ids, np.arange(2 + TOKENS))
            assert sequence.behavior_logprobs.sum() == -0.5 * TOKENS
            assert sequence.token_ids.flags.aligned


@pytest.mark.parametrize("options", [(), ("--no-journal",)])
def test_groups_pass_through_memory_which_is_free_again_once_they_are_trained(servers, tmp_path, options):
    _, learner, generator = started(servers, str(tmp_path / "run"), *options)
    assert shared(learner)["bytes"] == 0
    for step in range(3):
        assert return_large(generator, get_leases(generator, step), step) == ["queued", "queued"]
        # Two groups of 2 x 4002 tokens of 13 bytes, and their headers.
        assert 2 * 104_052 < shared(learner)["bytes"] < 2 * 107_000
        check_taken(learner.take("line-a", step, step, 5.0), [2 * step, 2 * step + 1])
        learner.ack("line-a", step, step + 1, all_trained(tokens=TOKENS))
        assert shared(learner)["bytes"] == 0


def test_a_group_that_is_not_kept_leaves_no_memory_in_use(servers, tmp_path):
    _, learner, generator = started(servers, str(tmp_path / "run"))
    lease = get_leases(generator, count=1)[0]
    assert return_large(generator, [lease]) == ["queued"]
    before = shared(learner)["bytes"]
    assert return_large(generator, [lease]) == ["duplicate"]
    assert shared(learner)["bytes"] == before


def test_without_shared_memory_everything_goes_through_the_socket(servers, tmp_path):
    _, learner, generator = started(servers, str(tmp_path / "run"), shared_memory=False)
    assert shared(learner) == {}
    assert return_large(generator, get_leases(generator)) == ["queued", "queued"]
    check_taken(learner.take("line-a", 0, 0, 5.0), [0, 1])


def test_small_groups_take_the_socket_unless_the_config_says_otherwise(servers, tmp_path):
    for name, limit in (("large", 1 << 20), ("all", 0)):
        server = servers.start(
            make_config(str(tmp_path / name), sampling=SAMPLING, queue={"shared_memory_from": limit})
        )
        learner, generator = servers.learner(server.address), servers.generator(server.address)
        attach(learner)
        generator.hello(10.0, "fake", "host-1")
        agree(learner, generator)
        assert return_large(generator, get_leases(generator)) == ["queued", "queued"]
        assert (shared(learner)["bytes"] > 0) == (limit == 0)
        check_taken(learner.take("line-a", 0, 0, 5.0), [0, 1])


def test_groups_outlive_the_server_and_memory_is_shared_with_the_next_one(servers, tmp_path):
    config = make_config(str(tmp_path / "run"), sampling=SAMPLING)
    server, learner, generator = started(servers, str(tmp_path / "run"))
    first, second = get_leases(generator)
    assert return_large(generator, [first]) == ["queued"]
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    # Into the dead server's connection: it is sent again, as a body, to whoever is there next.
    generator.return_group(large_group(second))
    again = servers.start(config, "--run-id", "run")
    assert again.address == server.address
    assert [e.verdict for e in events_until(generator, Returned) if isinstance(e, Returned)] == ["queued"]
    agree(learner, generator)
    check_taken(learner.take("line-a", 0, 0, 5.0), [0, 1])
    learner.ack("line-a", 0, 1, all_trained(tokens=TOKENS))


def test_a_server_that_does_not_know_a_clients_memory_gets_the_bodies(servers, tmp_path):
    _, learner, generator = started(servers, str(tmp_path / "run"))
    held = get_leases(generator)
    # A server forgets whoever asks for memory, until it has agreed anew; this client has not heard the answer yet.
    generator._connection.post("arena", {})
    wait_until(lambda: shared(learner)["clients"] == 1, "the server to forget")
    assert generator._connection.shares_memory
    assert return_large(generator, held) == ["queued", "queued"]
    agree(learner, generator)
    check_taken(learner.take("line-a", 0, 0, 5.0), [0, 1])


# The server's side, in one process.


def introduced(neighbours: Neighbours, arena: Arena, own: Arena | None = None, **changes: object) -> bool:
    fields = {"proof": arena.token}
    if own is not None:
        fields |= {**address_fields(own.address), "token": own.token}
    reply = neighbours.answer(b"peer", Message("share", fields | changes))
    assert reply is not None
    return reply.fields["is_shared"]


@pytest.fixture
def arenas():
    made = Arena(1 << 16), Arena(1 << 16)
    yield made
    for arena in made:
        arena.close()


def test_only_who_can_read_the_servers_memory_shares_it(arenas):
    servers_own, clients_own = arenas
    neighbours = Neighbours(servers_own, 0)
    reply = neighbours.answer(b"peer", Message("arena", {}))
    assert reply is not None
    assert ArenaReader(servers_own.address).token == servers_own.token
    assert reply.fields == {**address_fields(servers_own.address), "from_bytes": 0}
    assert not introduced(neighbours, servers_own, proof=b"a guess")
    assert not introduced(neighbours, servers_own, clients_own, token=b"another's")
    assert not introduced(neighbours, servers_own, clients_own, fd=9999)
    assert len(neighbours) == 0
    assert introduced(neighbours, servers_own, clients_own)
    assert len(neighbours) == 1
    # Asking again begins again.
    neighbours.answer(b"peer", Message("arena", {}))
    assert len(neighbours) == 0


@pytest.mark.parametrize("changes", [{"pid": "1"}, {"pid": 0}, {"fd": -1}, {"token": "text"}, {"proof": None}])
def test_a_malformed_introduction_is_refused(arenas, changes):
    with pytest.raises(WireError):
        introduced(Neighbours(arenas[0], 0), *arenas, **changes)


def test_without_an_arena_nobody_shares_memory():
    neighbours = Neighbours(None, 0)
    reply = neighbours.answer(b"peer", Message("arena", {}))
    assert reply is not None
    assert reply.fields == {}
    reply = neighbours.answer(b"peer", Message("share", {"proof": b""}))
    assert reply is not None
    assert reply.fields == {"is_shared": False}


def test_references_are_fetched_into_the_servers_memory_and_freed_unless_kept(arenas):
    servers_own, clients_own = arenas
    neighbours, bodies = Neighbours(servers_own, 0), MemoryBodies()
    introduced(neighbours, servers_own, clients_own)
    blocks = [clients_own.write([body], len(body)) for body in (b"kept" * 100, b"not kept" * 100)]
    frames = [memoryview(block.reference) for block in blocks if block is not None]
    fetched = neighbours.fetch(b"peer", [memoryview(b"a body itself"), *frames], 10_000)
    place = bodies.keep(fetched[1])
    free_unkept(fetched)
    assert servers_own.used_bytes == 448  # 16 + 400, rounded up to 64
    kept = bodies.read(place)
    # To its neighbour it goes as a reference, to others as bytes.
    assert len(neighbours.outgoing(b"peer", [kept])[0]) == 32
    assert neighbours.outgoing(b"stranger", [kept, b"plain"]) == [b"kept" * 100, b"plain"]
    bodies.release(place)
    assert servers_own.used_bytes == 0


def test_what_can_not_be_fetched_is_said_and_holds_no_memory(arenas):
    servers_own, clients_own = arenas
    neighbours = Neighbours(servers_own, 0)
    first, second = (clients_own.write([b"x" * 1000], 1000) for _ in range(2))
    assert first is not None
    assert second is not None
    frames = [memoryview(first.reference), memoryview(second.reference)]
    with pytest.raises(NotSharedError):
        neighbours.fetch(b"peer", frames, 10_000)
    introduced(neighbours, servers_own, clients_own)
    with pytest.raises(WireError, match="at most 1999 bytes"):
        neighbours.fetch(b"peer", frames, 1999)
    second.free()
    with pytest.raises(OutdatedError):
        neighbours.fetch(b"peer", frames, 10_000)
    assert servers_own.used_bytes == 0


def test_a_body_that_the_servers_memory_has_no_room_for_is_fetched_all_the_same(arenas):
    small, clients_own = Arena(64), arenas[1]
    neighbours = Neighbours(small, 0)
    introduced(neighbours, small, clients_own)
    block = clients_own.write([b"x" * 1000], 1000)
    assert block is not None
    fetched = neighbours.fetch(b"peer", [memoryview(block.reference)], 10_000)
    assert fetched == [b"x" * 1000]
    small.close()


def test_the_memory_of_clients_that_have_ended_is_let_go(arenas):
    servers_own, _ = arenas
    neighbours = Neighbours(servers_own, 0)
    gone = Arena(1 << 16)
    introduced(neighbours, servers_own, gone)
    neighbours.look(100.0)
    assert len(neighbours) == 1
    gone.close()  # its descriptor is closed, as with the process
    neighbours.look(104.0)
    assert len(neighbours) == 1
    neighbours.look(106.0)
    assert len(neighbours) == 0
