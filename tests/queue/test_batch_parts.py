"""A batch on the wire: several messages, put together by the learner, whatever is lost or comes twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import zmq
from msgspec.structs import asdict

from async_rl.net.codec import encode_group
from async_rl.net.wire import decode, encode
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import Batch, BatchPart, Taken
from async_rl.queue.server.handlers import Reply, batch_reply
from async_rl.queue.storage.payloads import Payload
from async_rl.records import Lease, Prompt
from tests.queue.builders import LINEAGE, SAMPLING, group

DEADLINE_S = 20.0
KIB = 1 << 10


def taken(position: int, payload: bytes) -> Taken[Payload]:
    return Taken(payload, Prompt(position, position, 0, ({"role": "user", "content": "?"},), {}), 0.5, 3, False)


def parts_of(sizes: Sequence[int]) -> list[Reply]:
    reply = batch_reply([taken(position, bytes(size)) for position, size in enumerate(sizes)])
    return [reply, *reply.further]


def record_of(reply: Reply) -> BatchPart:
    assert isinstance(reply.record, BatchPart)
    return reply.record


def test_a_message_of_a_batch_ends_with_the_group_that_fills_a_mebibyte():
    parts = parts_of([600 * KIB, 600 * KIB, 10, 1024 * KIB, 1, 2])
    assert [[len(payload) // KIB for payload in part.parts] for part in parts] == [[600, 600], [0, 1024], [0, 0]]
    assert [record_of(part).first for part in parts] == [0, 2, 4]
    assert [record_of(part).more for part in parts] == [True, True, False]
    assert {record_of(part).num_groups for part in parts} == {6}
    positions = [entry.prompt.position for part in parts for entry in record_of(part).groups]
    assert positions == list(range(6))


def test_a_small_batch_is_one_message():
    (only,) = parts_of([10, 20, 30])
    assert (record_of(only).first, record_of(only).more, len(only.parts)) == (0, False, 3)


def test_a_large_batch_is_at_most_64_messages():
    whole = bytes(1024 * KIB)
    reply = batch_reply([taken(position, whole) for position in range(200)])
    # 200 MiB in messages of at least 200 / 64 MiB: four groups each.
    assert [len(part.parts) for part in (reply, *reply.further)] == [4] * 50


# The learner's side, before a server that answers its takes by a script.

Script = Sequence[Sequence[int]]
"""For each take: which of the batch's three messages are sent, in which order."""


def batch() -> list[Reply]:
    """Three messages of one group each."""
    payloads: list[bytes] = []
    for position in range(3):
        prompt = Prompt(position, position, 0, ({"role": "user", "content": "?"},), {})
        lease = Lease(f"lease-{position}", "train", prompt, 2, SAMPLING, LINEAGE, 0, 1, 1, 0)
        payloads.append(encode_group(group(lease, 0)))
    entries = record_of(batch_reply([taken(position, payload) for position, payload in enumerate(payloads)])).groups
    return [
        Reply(BatchPart((entry,), first, num_groups=3, more=first < 2), [payloads[first]])
        for first, entry in enumerate(entries)
    ]


@contextmanager
def answering(
    script: Script, before_message: Callable[[], object] = lambda: None
) -> Iterator[tuple[str, Callable[[], int]]]:
    """The address of a server that answers one take after the other, and how many came."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    # A client repeats a request that it sent before it knew of its connection: that is the same take.
    takes: dict[str, Sequence[int]] = {}
    has_ended = threading.Event()

    def serve() -> None:
        left = iter(script)
        while not has_ended.is_set():
            if not router.poll(20):
                continue
            peer, frame = router.recv_multipart()
            request_id = decode(frame).fields["request_id"]
            if request_id not in takes:
                takes[request_id] = next(left, ())
            for message in (batch()[index] for index in takes[request_id]):
                plain = {**asdict(message.record), "request_id": request_id}
                frames = [encode("batch", plain, num_parts=len(message.parts)), *message.parts]
                before_message()
                router.send_multipart([peer, *map(bytes, frames)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}", lambda: len(takes)
    finally:
        has_ended.set()
        thread.join(DEADLINE_S)
        router.close()
        context.term()


def positions_taken(script: Script) -> tuple[list[int], int]:
    with answering(script) as (address, num_takes), closing(LearnerQueue(address, DEADLINE_S)) as queue:
        answer = queue.take(LINEAGE, 0, 0, 0.0)
        assert isinstance(answer, Batch)
        for number, group_taken in enumerate(answer.groups):
            assert group_taken.group.lease_id == f"lease-{number}"
        return [group_taken.prompt.position for group_taken in answer.groups], num_takes()


def test_the_messages_of_a_batch_make_it_up():
    assert positions_taken([[0, 1, 2]]) == ([0, 1, 2], 1)


def test_a_batch_that_begins_again_counts_from_its_first_group():
    assert positions_taken([[0, 1, 0, 1, 2]]) == ([0, 1, 2], 1)


def test_a_batch_with_a_part_lost_is_asked_for_again():
    assert positions_taken([[0, 2], [0, 1, 2]]) == ([0, 1, 2], 2)
    assert positions_taken([[1, 2], [0, 1, 2]]) == ([0, 1, 2], 2)


def test_a_batch_that_keeps_coming_is_awaited_however_long_it_takes(monkeypatch: pytest.MonkeyPatch):
    # Limit 60 s; 40 s pass before each of the three messages.
    now, may_send = [0.0], threading.Semaphore(0)
    monkeypatch.setattr("async_rl.queue.client.clients.time", SimpleNamespace(monotonic=lambda: now[0]))
    num_sent = 0

    def pass_time() -> None:
        nonlocal num_sent
        if sum(map(len, queue._arrived.values())) == num_sent:
            now[0] += 40.0
            num_sent += 1
            may_send.release()

    with (
        answering([[0, 1, 2]], lambda: may_send.acquire(timeout=DEADLINE_S)) as (address, _),
        closing(LearnerQueue(address, 60.0, while_waiting=pass_time)) as queue,
    ):
        answer = queue.take(LINEAGE, 0, 0, 0.0)
    assert isinstance(answer, Batch)
    assert (len(answer.groups), now[0]) == (3, 120.0)
