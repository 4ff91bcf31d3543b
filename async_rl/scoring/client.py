"""Asks one scorer, from any thread, and waits for it while it is away.

A thread of its own has the socket. A question is sent again when the scorer was away and is back, so nothing is lost by
its death, and nothing is answered in its place. A scorer whose model is not the one that answered first counts as away.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import zmq

from async_rl.errors import RewardError, WireError
from async_rl.net.address import check_address
from async_rl.net.keys import ClientKeys
from async_rl.net.link import Link
from async_rl.scoring.messages import (
    Answer,
    Received,
    TextQuestion,
    TokensQuestion,
    decode_answer,
    encode_question,
)

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""After this long without an answer from a connected scorer, ``trouble`` says that it is slow or suspended."""
_LOOK_S = 0.5
_ASK_AGAIN_S = 5.0
"""How often a scorer that had another model is asked again."""
_Question = TextQuestion | TokensQuestion
_POLLIN = int(zmq.POLLIN)


@dataclass(slots=True)
class _Waiting:
    frame: bytes
    future: Future[tuple[np.ndarray, ...]]


class ScorerClient:
    """Asks the scorer ``name`` at ``address``.

    Args:
        name: the scorer's name in the config, for texts.
        keys: this client's keys, if the run has keys.
        digest: the digest that the scorer's model must have. None: that of the first answer.
        vocabulary: the digest that its vocabulary must have. None: any.

    Raises:
        AddressError: the address is malformed.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: ClientKeys | None = None,
        *,
        digest: str | None = None,
        vocabulary: str | None = None,
    ) -> None:
        check_address(address)
        self._name, self._address, self._keys = name, address, keys
        self._digest, self._vocabulary = digest, vocabulary
        self._numbers = itertools.count()
        self._asked: queue.SimpleQueue[tuple[int, _Waiting]] = queue.SimpleQueue()
        self._waiting: dict[int, _Waiting] = {}
        self._trouble, self._misfit = "", ""
        self._lock, self._is_closed = threading.Lock(), False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_address = f"inproc://wake-{uuid.uuid4().hex}"
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind(self._wake_address)
        self._thread = threading.Thread(target=self._run, name=f"scorer-{name}", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why answers are not coming; empty if nothing is known to be wrong or nothing is asked."""
        return self._trouble

    @property
    def num_waiting(self) -> int:
        """The number of questions without an answer."""
        return len(self._waiting) + self._asked.qsize()

    def score(self, messages: list[dict[str, str]], text: str) -> Future[tuple[np.ndarray, ...]]:
        """Ask for the score of an answer. The result has one array, float32 [1]."""
        return self._ask(lambda number: encode_question(TextQuestion(number, messages, text)))

    def logprobs(
        self, token_ids: np.ndarray, loss_mask: np.ndarray, *, temperature: float, top_k: int
    ) -> Future[tuple[np.ndarray, ...]]:
        """Ask for the log-probabilities of the sampled tokens of a sequence. The result is as ``Answer`` describes."""
        arrays = (np.ascontiguousarray(token_ids, "<i4"), np.ascontiguousarray(loss_mask, "|b1"))
        return self._ask(lambda number: encode_question(TokensQuestion(number, temperature, top_k), arrays))

    def close(self) -> None:
        """End the thread. Questions without an answer fail with ``RewardError``. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.send(b"")
        self._thread.join()
        self._wake.close(linger=0)
        self._context.term()

    def _ask(self, encode: Callable[[int], bytes]) -> Future[tuple[np.ndarray, ...]]:
        """Post the question that ``encode`` makes of its number.

        The future's result is the answer's arrays. It fails with ``RewardError`` if the scorer can't answer this
        question, or if the client is closed.
        """
        future: Future[tuple[np.ndarray, ...]] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(self._closed_error())
                return future
            number = next(self._numbers)
            self._asked.put((number, _Waiting(encode(number), future)))
            self._wake.send(b"")
        return future

    def _closed_error(self) -> RewardError:
        return RewardError(f"the scorer {self._name} was asked by a generator that ends; the prompt is sampled again")

    def _run(self) -> None:
        dealer = self._dealer()
        wake = self._context.socket(zmq.PAIR)
        wake.connect(self._wake_address)
        public_key = "" if self._keys is None else self._keys.public.decode()
        link = Link(dealer, self._address, f"the scorer {self._name}", public_key)
        poller = zmq.Poller()
        for socket in (dealer, wake):
            poller.register(socket, zmq.POLLIN)
        link.register(poller)
        dealer.connect(self._address)
        try:
            self._serve(dealer, wake, link, poller)
        finally:
            link.close()
            dealer.close(linger=0)
            wake.close(linger=0)
            while not self._asked.empty():
                number, waiting = self._asked.get()
                self._waiting[number] = waiting
            for waiting in self._waiting.values():
                waiting.future.set_exception(self._closed_error())
            self._waiting.clear()

    def _dealer(self) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        # Whoever knows this id can take over the connection, so it is random.
        dealer.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            dealer.setsockopt(option, 0)  # a generator asks no more than its groups in flight
        dealer.setsockopt(zmq.IPV6, int(":" in check_address(self._address)[0]))
        if self._keys is not None:
            self._keys.identify(dealer)
        return dealer

    def _serve(self, dealer: zmq.Socket[bytes], wake: zmq.Socket[bytes], link: Link, poller: zmq.Poller) -> None:
        heard_at = asked_again_at = time.monotonic()
        while not self._is_closed:
            ready = dict(poller.poll(round(_LOOK_S * 1000)))
            now = time.monotonic()
            if wake in ready:
                wake.recv()
                if not self._waiting:
                    heard_at = now
                self._take_asked(dealer, is_connected=link.is_connected)
            if dealer in ready:
                heard_at = now
                self._receive(dealer.recv())
            asks_again = bool(self._misfit) and now - asked_again_at > _ASK_AGAIN_S
            if link.update() or asks_again:
                asked_again_at = now
                for waiting in self._waiting.values():
                    dealer.send(waiting.frame)
            self._note(link, silent_s=now - heard_at if self._waiting else 0.0)

    def _take_asked(self, dealer: zmq.Socket[bytes], *, is_connected: bool) -> None:
        """Send new questions. Without a connection they are sent when there is one, with all others that wait."""
        while not self._asked.empty():
            number, waiting = self._asked.get()
            self._waiting[number] = waiting
            if is_connected:
                dealer.send(waiting.frame)

    def _receive(self, frame: bytes) -> None:
        try:
            received = decode_answer(frame)
        except WireError as error:
            logger.warning("the scorer %s sent a malformed answer, which is ignored: %s", self._name, error)
            return
        answer: Answer = received.message
        if answer.request_id not in self._waiting:
            return  # it was asked twice
        self._misfit = self._why_unfit(answer)
        if not self._misfit:
            self._digest = answer.digest
            self._deliver(answer, received)

    def _deliver(self, answer: Answer, received: Received) -> None:
        waiting = self._waiting.pop(answer.request_id)
        if answer.error:
            waiting.future.set_exception(RewardError(f"the scorer {self._name}: {answer.error}"))
        else:
            waiting.future.set_result(received.arrays)

    def _why_unfit(self, answer: Answer) -> str:
        where = f"the scorer {self._name} at {self._address}"
        if self._digest not in (None, answer.digest):
            return (
                f"{where} has another model than the run began with: expected the digest {self._digest}, got "
                f"{answer.digest}; start it with the run's model"
            )
        if self._vocabulary not in (None, answer.vocabulary):
            return (
                f"{where} has another vocabulary than the model that it scores; a teacher needs a tokenizer with the "
                f"same tokens and ids as model.path, so choose another model"
            )
        return ""

    def _note(self, link: Link, *, silent_s: float) -> None:
        trouble = ""
        if self._waiting:
            trouble = link.trouble or self._misfit
            if not trouble and silent_s > SILENT_S:
                trouble = (
                    f"the scorer {self._name} at {self._address} has not answered for {SILENT_S:.0f} s; see its log, "
                    f"and check that it is not suspended"
                )
        if trouble != self._trouble:
            self._trouble = trouble
            logger.log(
                logging.WARNING if trouble else logging.INFO,
                "%s",
                f"grading waits: {trouble}" if trouble else f"the scorer {self._name} answers again",
            )
