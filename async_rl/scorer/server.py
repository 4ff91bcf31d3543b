"""Answers the questions of generators with a model, batch after batch.

The thread that calls ``serve`` computes. While it computes a batch, the socket's thread (``scorer.sockets``) receives
questions and sends answers; ``scorer.questions`` says which questions form the next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from async_rl.net.keys import ServerKeys
from async_rl.scorer.client.messages import Answer, Received, decode_question, encode_answer
from async_rl.scorer.questions import Question, WaitingQuestions
from async_rl.scorer.sockets import ScorerSocket

_LOOK_MS = 500

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
    """The socket at ``address``, and the questions that wait for ``model``.

    Raises:
        AddressError: the address can't be bound.
    """

    def __init__(self, address: str, model: ScoringModel, keys: ServerKeys | None = None) -> None:
        self._model, self._questions = model, WaitingQuestions()
        self._socket = ScorerSocket(
            address, keys, self._questions, digest=model.digest, vocabulary=model.vocabulary
        )  # fmt: skip

    def serve(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Answer questions until ``is_over``, which is called at least every half second while nothing is asked."""
        while not is_over():
            self._socket.check()
            if batch := self._questions.take(_LOOK_MS / 1000):
                start = time.monotonic()
                self._socket.send(self._answers(batch))
                self._questions.note_batch(batch, time.monotonic() - start)

    def close(self) -> None:
        self._socket.close()

    def _answers(self, batch: Sequence[Question]) -> list[tuple[Question, bytes]]:
        scored = self._model.answer([decode_question(question.frame) for question in batch])
        return [(question, self._encoded(question, one)) for question, one in zip(batch, scored, strict=True)]

    def _encoded(self, question: Question, scored: Scored) -> bytes:
        error, arrays = (scored, ()) if isinstance(scored, str) else ("", scored)
        return encode_answer(Answer(question.request_id, self._model.digest, self._model.vocabulary, error), arrays)
