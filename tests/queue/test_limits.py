"""What the server looks at: rates of a peer, sizes of a message, and how many generators it knows."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import zmq

from async_rl.config.queue import QueueConfig
from async_rl.config.run import ExperimentalConfig
from async_rl.errors import QueueError, WireError
from async_rl.net import connections
from async_rl.net.wire import Message, decode, encode
from async_rl.queue.core.generators import GeneratorTable
from async_rl.queue.server.sockets import BLOCKED_S, MAX_PEERS, Endpoint, MessageLimits, RateLimiter
from async_rl.queue.storage.journal import Changes
from tests.queue.conftest import wait_until


def limiter(messages: float = 10, malformed: float = 3) -> RateLimiter:
    return RateLimiter(max_messages_per_s=messages, max_malformed_per_minute=malformed)


def test_a_peer_has_a_burst_and_then_its_rate():
    # 10 at once; then a tenth of a second buys one more, and idling saves no more than 10.
    limited = limiter()
    assert [limited.admits(b"a", 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert limited.admits(b"a", 0.1)
    assert not limited.admits(b"a", 0.1)
    assert [limited.admits(b"a", 100.0) for _ in range(11)] == [True] * 10 + [False]
    assert limited.num_limited == 3
    assert limited.admits(b"b", 0.1), "another peer's rate is its own"


def test_time_that_runs_backwards_gives_nothing():
    limited = limiter(messages=1)
    assert limited.admits(b"a", 10.0)
    assert not limited.admits(b"a", 5.0)
    assert not limited.admits(b"a", 10.5)
    assert limited.admits(b"a", 11.5)


def test_a_peer_that_sends_too_many_malformed_messages_is_unheard_for_a_minute():
    limited = limiter()
    # Three a minute are forgiven; the fourth is one too many.
    assert [limited.note_malformed(b"a", 0.0) for _ in range(4)] == [False, False, False, True]
    assert not limited.admits(b"a", BLOCKED_S - 1)
    assert limited.admits(b"b", 1.0)
    assert limited.admits(b"a", BLOCKED_S + 1)
    # Now it has three again.
    assert [limited.note_malformed(b"a", BLOCKED_S + 1) for _ in range(4)] == [False, False, False, True]
    assert limited.num_malformed == 8


def test_malformed_messages_are_forgiven_at_their_rate():
    # One every 20 s is three a minute, for ever.
    limited = limiter()
    assert not any(limited.note_malformed(b"a", 20.0 * number) for number in range(100))


def test_only_so_many_peers_are_remembered():
    limited = limiter()
    for number in range(3 * MAX_PEERS):
        limited.admits(b"%d" % number, 0.0)
    assert len(limited) == MAX_PEERS


def sized(type_: str, num_bytes: int) -> tuple[Message, int]:
    frame = encode(type_, {}, [np.zeros(num_bytes, np.uint8)])
    return decode(frame), len(frame)


def test_only_the_messages_that_carry_data_may_be_large():
    sizes = MessageLimits(max_bytes=4 << 20)
    for type_, most in (("heartbeat", 1 << 20), ("no_such", 1 << 20), ("return", 4 << 20)):
        sizes.check(*sized(type_, most - 4096))
        with pytest.raises(WireError, match=f"expected at most {most} bytes in a '{type_}' message"):
            sizes.check(*sized(type_, most))
    sizes.check(*sized("attach", 5 << 20))
    assert sizes.wire.max_bytes == (4 << 20) + (256 << 20)


def test_a_header_may_not_be_what_would_grow_in_memory():
    frame = encode("heartbeat", {"progress": [[]] * (300 << 10)})
    with pytest.raises(WireError, match="expected a header that fits"):
        decode(frame, MessageLimits(max_bytes=4 << 20).wire)


def test_arrays_that_overlap_are_refused():
    array = np.zeros(1000, np.uint8)
    frame = encode("attach", {}, [array, array])
    message = decode(frame)
    overlapping = Message("attach", {}, (message.arrays[0], message.arrays[0], message.arrays[0]))
    with pytest.raises(WireError, match="arrays overlap"):
        MessageLimits(max_bytes=4 << 20).check(overlapping, len(frame))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2**53 + 1, -(2**63), 1e300])
def test_numbers_that_no_sum_can_carry_are_refused(number: float):
    sizes = MessageLimits(max_bytes=4 << 20)
    for fields in ({"wait_s": number}, {"stats": {"tokens": number}}, {"progress": [1, [number]]}):
        with pytest.raises(WireError, match="expected numbers from"):
            sizes.check(Message("heartbeat", fields), 100)


def test_a_full_table_refuses_another_generator_until_one_left_or_fell_silent():
    table = GeneratorTable(30.0, Changes(), max_generators=2)
    table.bind(table.seen("a", 0.0), b"peer-a")
    table.seen("b", 0.0)
    with pytest.raises(QueueError, match="at most 2 generators"):
        table.seen("c", 1.0)
    with pytest.raises(WireError, match="of generator 'a' on this connection"):
        table.check_peer(b"peer-a", "b")
    assert table.seen("a", 300.0).peer == b"peer-a"
    # "b" was silent for more than 10 * 30 s.
    assert table.forget_silent(301.0) == 1
    table.seen("c", 301.0)
    assert table.get("b") is None
    table.remove("a")
    table.check_peer(b"peer-a", "d")
    table.bind(table.seen("d", 301.0), b"peer-a")
    assert table.using(b"peer-a") is table.get("d")


def test_a_client_above_the_limit_on_open_files_is_named_as_such(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(connections, "most_connections", lambda _: 1)
    endpoint = Endpoint(QueueConfig(), ExperimentalConfig(), insecure=False)
    with zmq.Context() as context:
        clients = [context.socket(zmq.DEALER) for _ in range(2)]
        for client in clients:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(endpoint.address)
            client.send(b"hello")
        wait_until(lambda: not list(endpoint.receive(8, time.monotonic())) and "closed 1 conn" in caplog.text, "a line")
        for client in clients:
            client.close()
    endpoint.close()
    assert endpoint.most_connections == 1
    assert (
        "because 1 others are open, the most that this server admits; if that is less than 4096, raise" in caplog.text
    )
    assert "sent no message in time" not in caplog.text
