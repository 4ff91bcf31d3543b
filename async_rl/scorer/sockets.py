"""A scorer's socket: admits questions, sends answers, and keeps what a slow reader costs small. It has its own thread.

While the model computes, this thread receives and refuses questions, sends answers, and closes the connections of
removed keys. An answer is sent in chunks, and only as fast as its client reads: ZeroMQ holds a few chunks, and the rest
waits here and counts for the client's budget. A client that reads nothing for ``STALL_S`` loses its connection, and its
answers with it. An honest client connects again and asks again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq

from async_rl.errors import WireError
from async_rl.net.address import check_address
from async_rl.net.keys import ServerKeys
from async_rl.net.service import LoggedCount, Peer, Service
from async_rl.net.wake import Wake
from async_rl.net.wire import Frame
from async_rl.scorer.client.messages import (
    CHUNK_BYTES,
    LIMITS,
    Answer,
    answer_bytes,
    chunks,
    decode_question,
    encode_answer,
    why_too_large,
)
from async_rl.scorer.questions import PeerBudget, Question, WaitingQuestions

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""A generator has one connection to each scorer."""
STALL_S = 10.0
"""After this long without a read byte, a client's answers are dropped and its connection is closed."""
RETRY_S = 1.0
"""When a client may ask again after a refusal."""
MAX_REFUSALS = 4096
"""Most refusals that wait for one client. More than that means that it does not wait before it asks again."""
_RECEIVE_HIGH_WATER_MARK, _SEND_HIGH_WATER_MARK = 8, 4
"""Messages of one connection in ZeroMQ's memory: questions, and messages of at most about ``CHUNK_BYTES``."""
_MAX_RECEIVED = 256
"""Most questions that are received before answers are sent."""
_LOOK_S = 0.5


@dataclass(slots=True, eq=False)
class _Client(Peer):
    budget: PeerBudget = field(init=False)
    num_refusals: int = 0

    def __post_init__(self) -> None:
        self.budget = PeerBudget(self.routing_id, self.key)

    def note_refusal_gone(self) -> None:
        self.num_refusals -= 1


class ScorerSocket:
    """The ROUTER socket at ``address``, served by a thread until ``close``. It puts questions into ``questions``.

    Args:
        digest: that of the model's files, for refusals.
        vocabulary: that of its tokenizer's vocabulary, for refusals.

    Raises:
        AddressError: the address can't be bound.
    """

    def __init__(
        self, address: str, keys: ServerKeys | None, questions: WaitingQuestions, *, digest: str, vocabulary: str
    ) -> None:
        self._questions, self._digest, self._vocabulary = questions, digest, vocabulary
        self._answers: queue.SimpleQueue[tuple[Question, Frame]] = queue.SimpleQueue()
        self._malformed = LoggedCount()
        self._error: BaseException | None = None
        self._is_closing = False
        host, port = check_address(address)
        self._service = Service(
            host, [port], keys, _Client, max_bytes=LIMITS.max_bytes, receive_mark=_RECEIVE_HIGH_WATER_MARK,
            send_mark=_SEND_HIGH_WATER_MARK, bundle_bytes=CHUNK_BYTES, stall_s=STALL_S,
            max_connections=MAX_CONNECTIONS, on_ended=lambda client: questions.forget(client.budget),
        )  # fmt: skip
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="scorer-socket", daemon=True)
        self._thread.start()

    def send(self, answers: Iterable[tuple[Question, Frame]]) -> None:
        """Send encoded answers.

        Raises:
            BaseException: what ended the socket's thread.
        """
        self.check()
        for answer in answers:
            self._answers.put(answer)
        self._wake.set()

    def check(self) -> None:
        """Raise what ended the socket's thread, if anything did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread and close the socket. Answers that are not read at once are dropped."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        self._service.close()
        self._wake.close()

    # Everything below runs in the socket's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        self._service.register(poller)
        try:
            while not self._is_closing:
                poller.poll(round(min(_LOOK_S, self._service.turn_within_s) * 1000))
                self._wake.clear()
                self._take_turn()
            self._take_turn()  # for the last answers
        except BaseException as error:
            self._error = error

    def _take_turn(self) -> None:
        for client, frames in self._service.receive(_MAX_RECEIVED):
            if client.is_open:
                self._receive(client, frames)
        while not self._answers.empty():
            self._answer(*self._answers.get())
        self._service.flush()

    def _receive(self, client: _Client, frames: Sequence[zmq.Frame]) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"expected a question of one frame, got {len(frames)} frames")
            received = decode_question(frames[0].buffer)
        except WireError as error:
            self._malformed.count += 1
            if self._malformed.to_log(time.monotonic()):
                logger.warning(
                    "malformed questions are ignored (%d since the start): %s", self._malformed.count, error
                )  # fmt: skip
            return
        message, size = received.message, len(frames[0])
        expected = answer_bytes(message, received.arrays)
        question = Question(frames[0].buffer, message.request_id, client.budget, size, expected)
        if refusal := why_too_large(size, expected):
            self._refuse(client, question, refusal, retry_s=0.0)
        elif refusal := self._questions.admit(question):
            self._refuse(client, question, refusal, retry_s=RETRY_S)

    def _refuse(self, client: _Client, question: Question, why: str, *, retry_s: float) -> None:
        if client.num_refusals >= MAX_REFUSALS:
            why = f"does not read {MAX_REFUSALS} refusals of its questions, the last one: {why}"
            self._service.disconnect(client, why)
            return
        client.num_refusals += 1
        answer = Answer(question.request_id, self._digest, self._vocabulary, why, retry_s)
        self._post(client, encode_answer(answer), client.note_refusal_gone)

    def _answer(self, question: Question, frame: Frame) -> None:
        client, release = self._service.peers.get(question.budget.peer), partial(self._questions.release, question)
        if client is None or client.budget is not question.budget:
            release()  # its connection has ended
        else:
            self._post(client, frame, release)

    def _post(self, client: _Client, frame: Frame, when_gone: Callable[[], None]) -> None:
        """Post an answer in chunks. ``when_gone`` is called when the last one has left, or all are dropped."""
        *first, last = chunks(frame)
        for chunk in first:
            self._service.post(client, chunk)
        self._service.post(client, last, when_gone)
