"""Answers the questions of generators with a model, batch after batch.

There is one thread. While it computes a batch, questions gather in the socket, and the next batch has all of them, up
to ``MAX_BATCH``. Questions are answered in the order of their batches, so none waits for ever.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import zmq

from async_rl.errors import AddressError, WireError
from async_rl.net.address import check_address, url_host
from async_rl.net.connections import RouterConnections
from async_rl.net.keys import Guard, ServerKeys
from async_rl.scoring.messages import LIMITS, Answer, Received, decode_question, encode_answer

logger = logging.getLogger(__name__)

MAX_BATCH = 512
"""Most questions of one batch. The model divides a batch further, by tokens."""
_LOOK_MS = 500
_MAX_PENDING = 65536

Scored = tuple[np.ndarray, ...] | str
"""A model's answer to one question: its arrays, or why it has none."""


class ScoringModel(Protocol):
    """A model that answers questions.

    Attributes:
        digest: that of its files.
        vocabulary: that of its tokenizer's vocabulary.
    """

    digest: str
    vocabulary: str

    def answer(self, questions: Sequence[Received]) -> list[Scored]:
        """Return the answers to ``questions``, in order."""
        ...


class ScorerServer:
    """The ROUTER socket at ``address``, and the questions that wait for ``model``.

    Raises:
        AddressError: the address can't be bound.
    """

    def __init__(self, address: str, model: ScoringModel, keys: ServerKeys | None = None) -> None:
        self._model = model
        self._pending: deque[tuple[bytes, Received]] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        allow_list = None if keys is None else keys.allow_list()
        self._connections = RouterConnections(self._socket, allow_list=allow_list)
        self._guard: Guard | None = None
        host, port = check_address(address)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, LIMITS.max_bytes)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # an answer that was dropped would be waited for
        try:
            if keys is not None and allow_list is not None:
                self._guard = keys.guard(self._socket, self._context, allow_list)
            self._socket.bind(f"tcp://{url_host(host)}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"can't bind {address}: {error.strerror}; choose another port or host") from None

    def serve(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Answer questions until ``is_over``, which is called at least every half second while nothing is asked."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        self._connections.register(poller)
        while not is_over():
            poller.poll(0 if self._pending else _LOOK_MS)
            self._connections.check()
            self._receive()
            if self._pending:
                self._answer([self._pending.popleft() for _ in range(min(MAX_BATCH, len(self._pending)))])

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._connections.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    def _receive(self) -> None:
        while len(self._pending) < _MAX_PENDING and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if not self._connections.note_message(frames[-1]):
                continue
            try:
                if len(frames) != 2:
                    raise WireError(f"expected a question of one frame, got {len(frames) - 1} frames")
                self._pending.append((frames[0].bytes, decode_question(frames[1].buffer)))
            except WireError as error:
                logger.warning("a malformed question is ignored: %s", error)

    def _answer(self, batch: Sequence[tuple[bytes, Received]]) -> None:
        answers = self._model.answer([received for _, received in batch])
        for (peer, received), scored in zip(batch, answers, strict=True):
            error, arrays = (scored, ()) if isinstance(scored, str) else ("", scored)
            answer = Answer(received.message.request_id, self._model.digest, self._model.vocabulary, error)
            self._socket.send_multipart([peer, encode_answer(answer, arrays)], zmq.NOBLOCK)
