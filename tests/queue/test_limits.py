"""What the server looks at: rates of a peer, sizes of a message, number of generators, and requests that wait."""

from __future__ import annotations

import math

import numpy as np
import pytest

from async_rl.errors import QueueError, WireError
from async_rl.net.wire import Message, decode, encode
from async_rl.queue.core import generator_requests
from async_rl.queue.core.generators import GeneratorTable
from async_rl.queue.messages import EvalWait
from async_rl.queue.server.handlers import Deferred, Handlers, Reply
from async_rl.queue.server.pending import PendingRequests, Request
from async_rl.queue.server.sockets import BLOCKED_S, MAX_PEERS, MessageLimits, RateLimiter
from async_rl.queue.storage.journal import Changes
from tests.queue.builders import LINEAGE, fill_and_take, leases, make_config, make_state


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
    # One every 20 s is three a minute, for ever.
    assert not any(limited.note_malformed(b"c", 20.0 * number) for number in range(100))


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


def test_a_full_table_refuses_another_generator_until_one_left_or_fell_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("async_rl.queue.core.generators.MAX_GENERATORS", 2)
    table = GeneratorTable(30.0, Changes())
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


# Requests that wait.


def test_of_many_equal_requests_one_is_tried_after_a_change():
    tried: list[bytes] = []
    revision, in_vain_at = 0, -1
    answered: list[bytes] = []
    pending = PendingRequests(
        lambda: revision, lambda request, _: answered.append(request.peer), lambda request, attempt, now: attempt()
    )

    def ask(peer: bytes) -> None:
        def attempt(now: float, last: bool) -> Reply | None:
            nonlocal in_vain_at
            tried.append(peer)
            if revision == 2:
                return Reply(EvalWait("", 0, 2, ""))
            in_vain_at = revision
            return None

        deferred = Deferred(60.0, attempt, lambda: in_vain_at == revision)
        pending.add(Request(peer, "1", None, "lease"), Message("lease", {}), deferred, 0.0)

    for number in range(100):
        ask(b"%d" % number)
    assert tried == [b"0"]
    revision = 1
    pending.answer(1.0)
    assert tried == [b"0", b"0"]
    # The order of arrival stays.
    revision = 2
    pending.answer(2.0)
    assert answered == [b"%d" % number for number in range(100)]
    assert pending.pop_all() == []


def lease_request(handlers: Handlers, generator_id: str, version: int = 0, max_leases: int = 1) -> Deferred:
    fields = {"generator_id": generator_id, "lineage": LINEAGE, "version": version, "max_leases": max_leases}
    answer = handlers.handle(decode(encode("lease", {**fields, "request_id": generator_id, "wait_s": 9.0})), 0.0)
    assert isinstance(answer, Deferred)
    return answer


def test_a_request_is_in_vain_only_after_an_equal_one_that_could_have_had_a_lease():
    # Bound 1, 2 groups a step: 4 groups at a time, of which 2 are taken and 1 is in flight.
    state = make_state()
    fill_and_take(state)
    assert len(leases(state, 1)) == 1
    handlers = Handlers(state, make_config("unused"), {}, "run")
    generator_requests.heartbeat(state, "bad", {}, state.stats().generators, 0.0)
    generator_requests.quarantine(state, "bad", "all its groups were refused")
    # Neither of these two gets the lease that is left, and both say nothing about others.
    assert lease_request(handlers, "bad").attempt(0.0, False) is None
    assert lease_request(handlers, "g1", max_leases=0).attempt(0.0, False) is None
    wanted = lease_request(handlers, "g2")
    assert not wanted.is_in_vain()
    assert wanted.attempt(0.0, False) is not None
    assert lease_request(handlers, "g3").attempt(0.0, False) is None
    later = lease_request(handlers, "g4")
    assert later.is_in_vain()
    assert not lease_request(handlers, "g5", version=1).is_in_vain()
    state.revision += 1
    assert not later.is_in_vain()
