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
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import zmq

from async_rl.errors import AddressError, WireError
from async_rl.net.connections import RouterConnections, bind_router
from async_rl.net.keys import Guard, ServerKeys
from async_rl.net.wire import Frame
from async_rl.scorer.questions import PeerBudget, Question, WaitingQuestions
from async_rl.scoring.messages import (
    CHUNK_BYTES,
    LIMITS,
    Answer,
    answer_bytes,
    chunks,
    decode_question,
    encode_answer,
    why_too_large,
)

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
_MAX_SENT = 64
"""Most messages that are sent to one client before questions are received."""
_SEND_AGAIN_S, _MAX_SEND_AGAIN_S = 0.001, 0.05
_LOOK_S = 0.5
_LOG_EVERY_S = 10.0


@dataclass(slots=True)
class _Outgoing:
    """An answer, or a refusal, that waits to be sent. ``question`` holds bytes of the budgets; None for a refusal."""

    frame: Frame
    question: Question | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection. ``unsent`` is the next message, and ``num_done`` how many answers of ``outgoing`` it completes."""

    fd: int
    budget: PeerBudget
    outgoing: deque[_Outgoing] = field(default_factory=deque)
    begun: deque[list[Frame]] = field(default_factory=deque)
    unsent: list[Frame] = field(default_factory=list)
    num_done: int = 0
    num_refusals: int = 0
    moved_at: float = 0.0

    def prepare(self) -> bool:
        """Fill ``unsent`` with chunks, of several answers if they are small. Return False if nothing is left."""
        if self.unsent:
            return True
        size, index = 0, 0
        while size < CHUNK_BYTES and index < len(self.outgoing):
            if not self.begun:
                self.begun.extend(chunks(self.outgoing[index].frame))
            place, part = self.begun.popleft()
            self.unsent += [place, part]
            size += len(part)
            index += not self.begun
        self.num_done = index
        return bool(self.unsent)


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
        self._has_keys = keys is not None
        self._peers: dict[bytes, _Peer] = {}
        self._by_descriptor: dict[int, _Peer] = {}
        self._answers: queue.SimpleQueue[tuple[Question, Frame]] = queue.SimpleQueue()
        self._num_malformed, self._malformed_logged_at = 0, float("-inf")
        self._send_again_s = _SEND_AGAIN_S
        self._error: BaseException | None = None
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_address = f"inproc://wake-{uuid.uuid4().hex}"
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind(self._wake_address)
        self._socket = self._context.socket(zmq.ROUTER)
        allow_list = None if keys is None else keys.allow_list()
        self._connections = RouterConnections(
            self._socket, allow_list=allow_list, max_connections=MAX_CONNECTIONS, on_ended=self._note_ended
        )
        self._guard: Guard | None = None
        self._thread = threading.Thread(target=self._run, name="scorer-socket", daemon=True)
        try:
            if keys is not None and allow_list is not None:
                self._guard = keys.guard(self._socket, self._context, allow_list)
            bind_router(
                self._socket, address, max_bytes=LIMITS.max_bytes, receive_mark=_RECEIVE_HIGH_WATER_MARK,
                send_mark=_SEND_HIGH_WATER_MARK,
            )  # fmt: skip
        except AddressError:
            self.close()
            raise
        self._thread.start()

    def send(self, answers: Iterable[tuple[Question, Frame]]) -> None:
        """Send encoded answers. Only one thread may call this.

        Raises:
            BaseException: what ended the socket's thread.
        """
        self.check()
        for answer in answers:
            self._answers.put(answer)
        self._wake.send(b"")

    def check(self) -> None:
        """Raise what ended the socket's thread, if anything did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread and close the socket. Answers that are not read at once are dropped."""
        self._is_closing = True
        if self._thread.ident is not None:
            self._wake.send(b"")
            self._thread.join()
        self._wake.close(linger=0)
        self._socket.close(linger=1000)
        self._connections.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    # Everything below runs in the socket's thread.

    def _run(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        wake.connect(self._wake_address)
        poller = zmq.Poller()
        for socket in (self._socket, wake):
            poller.register(socket, zmq.POLLIN)
        self._connections.register(poller)
        try:
            while not self._is_closing:
                timeout_s = min(_LOOK_S, self._connections.check_within_s)
                if any(peer.unsent for peer in self._peers.values()):
                    timeout_s = min(timeout_s, self._send_again_s)
                ready = dict(poller.poll(round(timeout_s * 1000)))
                if wake in ready:
                    wake.recv()
                self._take_turn(time.monotonic())
            self._take_turn(time.monotonic())  # for the last answers
        except BaseException as error:
            self._error = error
        finally:
            wake.close(linger=0)

    def _take_turn(self, now: float) -> None:
        self._connections.check()
        for _ in range(_MAX_RECEIVED):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            self._receive(self._socket.recv_multipart(zmq.NOBLOCK, copy=False), now)
        while not self._answers.empty():
            question, frame = self._answers.get()
            peer = self._peers.get(question.budget.peer)
            if peer is None or peer.budget is not question.budget:
                self._questions.release(question)  # its connection has ended
            else:
                self._post(peer, _Outgoing(frame, question), now)
        self._flush(now)

    def _receive(self, frames: Sequence[zmq.Frame], now: float) -> None:
        if not self._connections.note_message(frames[-1]) or not self._connections.is_open(_descriptor(frames[-1])):
            return
        try:
            if len(frames) != 2:
                raise WireError(f"expected a question of one frame, got {len(frames) - 1} frames")
            received = decode_question(frames[1].buffer)
        except WireError as error:
            self._note_malformed(error, now)
            return
        peer, message = self._peer_of(frames[0].bytes, frames[1]), received.message
        size, expected = len(frames[1]), answer_bytes(message, received.arrays)
        question = Question(frames[1].buffer, message.request_id, peer.budget, size, expected)
        if refusal := why_too_large(size, expected):
            self._refuse(peer, question, refusal, now, retry_s=0.0)
        elif refusal := self._questions.admit(question):
            self._refuse(peer, question, refusal, now, retry_s=RETRY_S)

    def _peer_of(self, peer_id: bytes, frame: zmq.Frame) -> _Peer:
        """Return the connection from which ``frame`` came. If it took the place of another one, forget that."""
        fd, known = _descriptor(frame), self._peers.get(peer_id)
        if known is not None and known.fd == fd:
            return known
        if known is not None:
            self._forget(known)
        key = str(frame.get("User-Id")) if self._has_keys else ""
        self._peers[peer_id] = self._by_descriptor[fd] = peer = _Peer(fd, PeerBudget(peer_id, key))
        return peer

    def _note_ended(self, fd: int) -> None:
        if (peer := self._by_descriptor.get(fd)) is not None:
            self._forget(peer)

    def _note_malformed(self, error: WireError, now: float) -> None:
        self._num_malformed += 1
        if now - self._malformed_logged_at >= _LOG_EVERY_S:
            self._malformed_logged_at = now
            logger.warning("malformed questions are ignored (%d since the start): %s", self._num_malformed, error)

    def _refuse(self, peer: _Peer, question: Question, why: str, now: float, *, retry_s: float) -> None:
        if peer.num_refusals >= MAX_REFUSALS:
            self._disconnect(peer, f"does not read {MAX_REFUSALS} refusals of its questions, the last one: {why}")
            return
        peer.num_refusals += 1
        answer = Answer(question.request_id, self._digest, self._vocabulary, why, retry_s)
        self._post(peer, _Outgoing(encode_answer(answer)), now)

    def _post(self, peer: _Peer, outgoing: _Outgoing, now: float) -> None:
        if not peer.outgoing:
            peer.moved_at = now
        peer.outgoing.append(outgoing)

    def _flush(self, now: float) -> None:
        """Send what has room, one message of each client in turn. Disconnect those that read nothing for too long."""
        self._send_again_s = min(2 * self._send_again_s, _MAX_SEND_AGAIN_S)
        waiting = list(self._peers.values())
        for _ in range(_MAX_SENT):
            waiting = [peer for peer in waiting if peer.prepare() and self._has_sent(peer, now)]
            if not waiting:
                break
            self._send_again_s = _SEND_AGAIN_S
        for peer in [peer for peer in self._peers.values() if peer.outgoing and now - peer.moved_at > STALL_S]:
            self._disconnect(
                peer,
                f"has read nothing of {len(peer.outgoing)} answers for {STALL_S:.0f} s, which are dropped; see whether "
                f"it is suspended, or its network is down",
            )

    def _has_sent(self, peer: _Peer, now: float) -> bool:
        """Try to send the connection's next message. Return False if there is no room, or if it is gone."""
        try:
            self._socket.send_multipart([peer.budget.peer, *peer.unsent], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer)
            return False
        peer.unsent, peer.moved_at = [], now
        for _ in range(peer.num_done):
            done = peer.outgoing.popleft()
            if done.question is None:
                peer.num_refusals -= 1
            else:
                self._questions.release(done.question)
        return True

    def _disconnect(self, peer: _Peer, why: str) -> None:
        name = f"with the key {peer.budget.key}" if peer.budget.key else "without a key"
        logger.warning("the connection of a client %s is closed: it %s", name, why)
        self._connections.shut_down(peer.fd)
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        """Drop the questions and answers of a connection that has ended. Its client asks again when it is back."""
        if self._peers.get(peer.budget.peer) is peer:
            del self._peers[peer.budget.peer]
        if self._by_descriptor.get(peer.fd) is peer:
            del self._by_descriptor[peer.fd]
        self._questions.forget(peer.budget)
        for outgoing in peer.outgoing:
            if outgoing.question is not None:
                self._questions.release(outgoing.question)
        peer.outgoing.clear()
        peer.begun.clear()
        peer.unsent, peer.num_done = [], 0


def _descriptor(frame: zmq.Frame) -> int:
    return int(frame.get("__fd"))
