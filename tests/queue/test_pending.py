"""How long a client has waited, over all requests that it repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rl.net.wire import Message, decode, encode
from async_rl.queue.core import generator_requests
from async_rl.queue.messages import EvalWait
from async_rl.queue.server.handlers import Deferred, Handlers, Reply
from async_rl.queue.server.pending import PendingRequests, Request
from tests.queue.builders import LINEAGE, fill_and_take, leases, make_config, make_state

WAIT_S = 0.5
POLL = Message("await_eval", {})


class Queue:
    """A queue whose learner asks for an evaluation that is finished when ``is_done``."""

    def __init__(self) -> None:
        self.is_done, self.revision = False, 0
        self.sent: list[Reply] = []
        self.pending = PendingRequests(lambda: self.revision, lambda _, reply: self.sent.append(reply), self._call)

    def _call(self, request: Request, attempt: Callable[[], Reply | None], now: float) -> Reply | None:
        return attempt()

    def ask(self, now: float, *, peer: bytes = b"learner") -> None:
        def attempt(now: float, last: bool) -> Reply | None:
            return Reply(EvalWait("" if self.is_done else "0 of 2 rows", 0, 2, "")) if last or self.is_done else None

        self.pending.add(Request(peer, f"{now}", None, "await_eval"), POLL, Deferred(WAIT_S, attempt), now)

    def waits(self, now: float) -> list[float]:
        return [wait["since_s"] for wait in self.pending.waits(now)]


def test_a_wait_counts_from_the_first_of_the_requests_that_were_answered_in_vain():
    queue = Queue()
    for turn in range(90):
        queue.ask(turn * WAIT_S)
        queue.pending.answer((turn + 1) * WAIT_S)
    assert len(queue.sent) == 90
    queue.ask(45.0)
    queue.ask(45.0, peer=b"another")
    assert queue.waits(45.25) == pytest.approx([45.25, 0.25])


def test_a_wait_ends_with_an_answer_even_at_its_deadline():
    queue = Queue()
    queue.ask(0.0)
    queue.is_done, queue.revision = True, 1
    queue.pending.answer(WAIT_S)
    queue.is_done, queue.revision = False, 2
    queue.ask(1.0)
    assert queue.waits(1.25) == pytest.approx([0.25])


def test_a_wait_ends_if_the_client_asks_no_more_for_a_while():
    queue = Queue()
    queue.ask(0.0)
    queue.pending.answer(WAIT_S)
    queue.ask(WAIT_S + 6.0)
    assert queue.waits(7.0) == pytest.approx([0.5])
    queue.pending.answer(7.0)
    queue.ask(20.0, peer=b"another")
    queue.pending.answer(20.5)
    assert list(queue.pending._in_vain) == [(b"another", "await_eval")]


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

        pending.add(
            Request(peer, "1", None, "lease"), POLL, Deferred(60.0, attempt, lambda: in_vain_at == revision), 0.0
        )

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


def test_the_time_at_which_a_request_ends_is_known_even_after_others_ended():
    queue = Queue()
    assert queue.pending.due_at == float("inf")
    queue.ask(0.0)
    queue.ask(0.3, peer=b"another")
    assert queue.pending.due_at == WAIT_S
    queue.pending.answer(WAIT_S)
    assert (len(queue.sent), queue.pending.due_at) == (1, 0.3 + WAIT_S)
    queue.pending.answer(0.3 + WAIT_S)
    assert (len(queue.sent), queue.pending.due_at) == (2, float("inf"))


def test_a_request_replaces_the_earlier_one_of_its_peer_and_type_only():
    queue = Queue()
    queue.ask(0.0)
    queue.ask(0.1, peer=b"another")
    queue.ask(0.2)
    queue.is_done, queue.revision = True, 1
    queue.pending.answer(0.2)
    assert len(queue.sent) == 2
    assert queue.pending.waits(0.2) == []


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
