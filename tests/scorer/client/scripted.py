"""A scorer in a thread, whose model is a few lines of Python, and which can be ended like a killed process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager

import numpy as np

from async_rl.net.keys import ServerKeys
from async_rl.scorer import server
from async_rl.scorer.client.messages import Received
from async_rl.scorer.client.scorer_client import ScorerClient
from async_rl.scorer.server import Scored, ScorerServer
from tests.ports import free_address

server._LOOK_MS = 20  # so that a scripted scorer ends soon


def score_of(future: Future[tuple[np.ndarray, ...]]) -> float:
    """The first number of an answer, for which this waits."""
    return float(future.result(timeout=60)[0].reshape(-1)[0])


def length_of_text(received: Received) -> Scored:
    return (np.array([len(received.message.text)], np.float32),)


class ScriptedModel:
    """Answers each question with ``score``; ``batches`` has the number of questions of each batch."""

    def __init__(
        self, score: Callable[[Received], Scored] = length_of_text, digest: str = "first", vocabulary: str = "words"
    ) -> None:
        self._score, self.digest, self.vocabulary = score, digest, vocabulary
        self.batches: list[int] = []

    def answer(self, questions: Sequence[Received]) -> list[Scored]:
        self.batches.append(len(questions))
        return [self._score(question) for question in questions]


class Dies(BaseException):
    """A scripted model raises it to end its scorer before it answers."""


class RunningScorer:
    """A scorer that serves in a thread until ``end``, or until its model raises ``Dies``."""

    def __init__(self, address: str, model: ScriptedModel, keys: ServerKeys | None = None) -> None:
        self.address, self._is_over = address, threading.Event()
        self.server = ScorerServer(address, model, keys)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        try:
            self.server.serve(self._is_over.is_set)
        except Dies:
            pass
        finally:
            self.server.close()

    def __enter__(self) -> RunningScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


@contextmanager
def scoring(
    score: Callable[[Received], Scored] = length_of_text, name: str = "judge"
) -> Iterator[tuple[RunningScorer, ScorerClient, ScriptedModel]]:
    """A scorer, a client of it, and the scorer's model."""
    address, model = free_address(), ScriptedModel(score)
    with RunningScorer(address, model) as scorer, closing(ScorerClient(name, address)) as client:
        yield scorer, client, model
