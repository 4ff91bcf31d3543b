"""Asks one scorer, from any thread, and waits for it while it is away.

A thread of its own has the socket. A question is sent again when the scorer was away and is back, so nothing is lost by
its death, and nothing is answered in its place. A scorer whose model is not the one that answered first counts as away.

The client sends no more than a connection's budget at a time (``messages.MAX_PEER_BYTES``); the other questions wait
here. A scorer that has no room refuses a question for now. Then the client asks again later, with fewer at a time.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import zmq

from async_rl.errors import RewardError, WireError
from async_rl.net.address import check_address
from async_rl.net.caller import Caller
from async_rl.net.keys import ClientKeys
from async_rl.net.link import Link
from async_rl.net.wake import Wake
from async_rl.scorer.client.messages import (
    CHUNK_BYTES,
    MAX_PEER_BYTES,
    MAX_PEER_QUESTIONS,
    Answer,
    AnswerReader,
    Received,
    TextQuestion,
    TokensQuestion,
    answer_bytes,
    decode_answer,
    encode_question,
    why_too_large,
)

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""After this long without an answer from a connected scorer, ``trouble`` says that it is slow or suspended."""
_LOOK_S = 0.5
_ASK_AGAIN_S = 5.0
"""How often a scorer that had another model is asked again."""
_BUSY_S = 10.0
"""After this long without an answer from a scorer that refuses questions for now, ``trouble`` says why."""
_BLOCKED_S = 0.01
_RECEIVE_HIGH_WATER_MARK = 64
"""Messages in ZeroMQ's memory, each of about ``CHUNK_BYTES`` at most."""
_Question = TextQuestion | TokensQuestion


@dataclass(slots=True)
class _Waiting:
    """A question without an answer. ``held_bytes`` is its size and that of its answer."""

    frame: bytes
    held_bytes: int
    future: Future[tuple[np.ndarray, ...]]


class _Window:
    """Which questions the scorer has, and which wait to be sent. Only the socket's thread uses it.

    A scorer that refuses a question for now halves the number of questions that it gets at a time. Each answer raises
    it by one.

    Attributes:
        resume_at: when to send again after a refusal, on the monotonic clock.
        is_blocked: whether the socket had no room or no connection for the last question.
    """

    def __init__(self) -> None:
        self._unsent: OrderedDict[int, _Waiting] = OrderedDict()
        self._sent: OrderedDict[int, _Waiting] = OrderedDict()
        self._size, self._sent_bytes = MAX_PEER_QUESTIONS, 0
        self.resume_at, self.is_blocked = 0.0, False

    def __len__(self) -> int:
        return len(self._unsent) + len(self._sent)

    def __contains__(self, number: int) -> bool:
        return number in self._sent or number in self._unsent

    def seconds_to_send(self, now: float) -> float:
        """Return when to call ``send`` again although nothing happens; infinity if that is not needed."""
        if not self._unsent or (now >= self.resume_at and not self.is_blocked):
            return float("inf")
        return max(self.resume_at - now, _BLOCKED_S)

    def add(self, number: int, waiting: _Waiting) -> None:
        self._unsent[number] = waiting

    def send(self, send: Callable[[bytes], bool], now: float) -> None:
        """Send the questions that the scorer may have now. ``send`` returns False if there is no connection."""
        self.is_blocked = False
        while self._unsent and now >= self.resume_at and len(self._sent) < self._size:
            number, waiting = next(iter(self._unsent.items()))
            if self._sent and self._sent_bytes + waiting.held_bytes > MAX_PEER_BYTES:
                return
            if not send(waiting.frame):
                self.is_blocked = True
                return
            self._sent[number] = self._unsent.pop(number)
            self._sent_bytes += waiting.held_bytes

    def refuse(self, number: int, retry_s: float, now: float) -> None:
        """Take back a question that the scorer refused for now. It is the next one that is sent."""
        if (waiting := self._take_back(number)) is not None:
            self._unsent[number] = waiting
            self._unsent.move_to_end(number, last=False)
            if now >= self.resume_at:  # the first refusal of this pause
                self.resume_at = now + retry_s
                self._size = max(1, len(self._sent) // 2)

    def take_back_all(self) -> None:
        """Take back all questions: the scorer has lost them, or did not answer them as it should."""
        self._unsent = OrderedDict([*self._sent.items(), *self._unsent.items()])
        self._sent.clear()
        self._sent_bytes, self.resume_at = 0, 0.0

    def pop(self, number: int) -> _Waiting:
        """Remove and return a question that is answered."""
        self._size = min(self._size + 1, MAX_PEER_QUESTIONS)
        waiting = self._take_back(number)
        return self._unsent.pop(number) if waiting is None else waiting

    def pop_all(self) -> list[_Waiting]:
        waiting = [*self._sent.values(), *self._unsent.values()]
        self._sent.clear()
        self._unsent.clear()
        return waiting

    def _take_back(self, number: int) -> _Waiting | None:
        waiting = self._sent.pop(number, None)
        if waiting is not None:
            self._sent_bytes -= waiting.held_bytes
        return waiting


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
        self._waiting, self._reader = _Window(), AnswerReader()
        self._misfit, self._busy = "", ""
        self.trouble = ""
        """Why answers are not coming; empty if nothing is known to be wrong or nothing is asked."""
        self._lock, self._is_closed = threading.Lock(), False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name=f"scorer-{name}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of questions without an answer."""
        return len(self._waiting) + self._asked.qsize()

    def score(self, messages: list[dict[str, str]], text: str) -> Future[tuple[np.ndarray, ...]]:
        """Ask for the score of an answer. The result has one array, float32 [1]."""
        return self._ask(lambda number: _encoded(TextQuestion(number, messages, text)))

    def logprobs(
        self, token_ids: np.ndarray, loss_mask: np.ndarray, *, temperature: float, top_k: int
    ) -> Future[tuple[np.ndarray, ...]]:
        """Ask for the log-probabilities of the sampled tokens of a sequence. The result is as ``Answer`` describes."""
        arrays = (np.ascontiguousarray(token_ids, "<i4"), np.ascontiguousarray(loss_mask, "|b1"))
        return self._ask(lambda number: _encoded(TokensQuestion(number, temperature, top_k), arrays))

    def close(self) -> None:
        """End the thread. Questions without an answer fail with ``RewardError``. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _ask(self, encode: Callable[[int], tuple[bytes, int]]) -> Future[tuple[np.ndarray, ...]]:
        """Post the question that ``encode`` makes of its number. ``encode`` also returns the size of its answer.

        The future's result is the answer's arrays. It fails with ``RewardError`` if the scorer can't answer this
        question, or if the client is closed.
        """
        future: Future[tuple[np.ndarray, ...]] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(self._closed_error())
                return future
            number = next(self._numbers)
            frame, expected = encode(number)
            if refusal := why_too_large(len(frame), expected):
                future.set_exception(RewardError(f"the scorer {self._name}: {refusal}"))
                return future
            self._asked.put((number, _Waiting(frame, len(frame) + expected, future)))
            self._wake.set()
        return future

    def _closed_error(self) -> RewardError:
        return RewardError(f"the scorer {self._name} was asked by a generator that ends; the prompt is sampled again")

    def _run(self) -> None:
        # All questions are sent again after a reconnection, so none waits for it in libzmq.
        caller = Caller(
            self._address, f"the scorer {self._name}", self._keys, max_bytes=CHUNK_BYTES,
            receive_mark=_RECEIVE_HIGH_WATER_MARK, send_mark=MAX_PEER_QUESTIONS, drops_unsent=True,
        )  # fmt: skip
        caller.poller.register(self._wake, zmq.POLLIN)
        try:
            self._serve(caller)
        finally:
            caller.close()
            while not self._asked.empty():
                self._waiting.add(*self._asked.get())
            for waiting in self._waiting.pop_all():
                waiting.future.set_exception(self._closed_error())

    def _serve(self, caller: Caller) -> None:
        heard_at = answered_at = asked_again_at = time.monotonic()
        while not self._is_closed:
            has_connected = caller.wait(min(_LOOK_S, self._waiting.seconds_to_send(time.monotonic())))
            now = time.monotonic()
            self._wake.clear()
            if not self._waiting:
                heard_at = answered_at = now
            while not self._asked.empty():
                self._waiting.add(*self._asked.get())
            for frames in caller.receive():
                heard_at = now
                if self._has_answer([frame.bytes for frame in frames], now):
                    answered_at = now
            asks_again = bool(self._misfit) and now - asked_again_at > _ASK_AGAIN_S
            if has_connected or asks_again:
                asked_again_at = now
                self._waiting.take_back_all()
            if caller.link.is_connected:
                self._waiting.send(lambda frame: caller.send([frame]), now)
            is_idle = not self._waiting
            self._note(
                caller.link, silent_s=0.0 if is_idle else now - heard_at, busy_s=0.0 if is_idle else now - answered_at
            )  # fmt: skip

    def _has_answer(self, frames: list[bytes], now: float) -> bool:
        """Take in a message. Return whether it completes an answer other than a refusal for now."""
        has_answer = False
        try:
            for frame in self._reader.feed(frames):
                has_answer |= self._receive(decode_answer(frame), now)
        except WireError as error:
            self._misfit = f"the scorer {self._name} at {self._address} sent a malformed answer: {error}"
        return has_answer

    def _receive(self, received: Received, now: float) -> bool:
        answer: Answer = received.message
        if answer.request_id not in self._waiting:
            return False  # it was asked twice
        self._misfit = self._why_unfit(answer)
        if self._misfit:
            return False
        self._digest = answer.digest
        if answer.retry_s:
            self._busy = answer.error
            self._waiting.refuse(answer.request_id, answer.retry_s, now)
            return False
        self._busy = ""
        self._deliver(answer, received)
        return True

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

    def _note(self, link: Link, *, silent_s: float, busy_s: float) -> None:
        trouble = ""
        if self._waiting:
            trouble = link.trouble or self._misfit
            if not trouble and self._busy and busy_s > _BUSY_S:
                trouble = f"the scorer {self._name} at {self._address} refuses questions for now: {self._busy}"
            if not trouble and silent_s > SILENT_S:
                trouble = (
                    f"the scorer {self._name} at {self._address} has not answered for {SILENT_S:.0f} s; see its log, "
                    f"and check that it is not suspended"
                )
        if trouble != self.trouble:
            self.trouble = trouble
            logger.log(
                logging.WARNING if trouble else logging.INFO,
                "%s",
                f"grading waits: {trouble}" if trouble else f"the scorer {self._name} answers again",
            )


def _encoded(
    question: TextQuestion | TokensQuestion, arrays: tuple[np.ndarray, ...] = ()
) -> tuple[bytes, int]:  # fmt: skip
    """Return the encoded question, and the size that its answer has at most."""
    return encode_question(question, arrays), answer_bytes(question, arrays)
