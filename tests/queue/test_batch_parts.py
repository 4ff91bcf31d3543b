"""A batch on the wire: several messages, put together by the learner, whatever is lost or comes twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    # A client repeats a request that it sent before it knew of its connection: that is the same take.
    takes: dict[str, Sequence[int]] = {}
    has_ended = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, ThreadPoolExecutor(1) as pool:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

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

        served = pool.submit(serve)
        try:
            yield f"tcp://127.0.0.1:{port}", lambda: len(takes)
        finally:
            has_ended.set()
            served.result(DEADLINE_S)


@pytest.mark.parametrize(
    ("script", "num_takes"),
    [([[0, 1, 2]], 1), ([[0, 1, 0, 1, 2]], 1), ([[0, 2], [0, 1, 2]], 2), ([[1, 2], [0, 1, 2]], 2)],
    ids=["whole", "begun again", "without the second", "without the first"],
)
def test_the_messages_of_a_batch_make_it_up_and_it_is_asked_for_again_if_one_is_lost(script: Script, num_takes: int):
    with answering(script) as (address, count), closing(LearnerQueue(address, DEADLINE_S)) as queue:
        answer = queue.take(LINEAGE, 0, 0, 0.0)
        assert isinstance(answer, Batch)
        assert [one.group.lease_id for one in answer.groups] == ["lease-0", "lease-1", "lease-2"]
        assert [one.prompt.position for one in answer.groups] == [0, 1, 2]
        assert count() == num_takes


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
