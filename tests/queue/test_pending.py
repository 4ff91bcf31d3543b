"""How long a client has waited, over all requests that it repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rl.net.wire import Message
from async_rl.queue.messages import EvalWait
from async_rl.queue.server.handlers import Deferred, Reply
from async_rl.queue.server.pending import PendingRequests, Request

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
