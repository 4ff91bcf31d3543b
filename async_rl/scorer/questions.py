"""The questions that wait for a scorer's model: budgets in bytes and numbers, and fair turns. No socket, no model.

A question holds bytes of its budgets from its arrival until its answer has left the process: its own size and that of
the answer that it asks for. There are three budgets: of one connection, of one client key (without keys all connections
together), and of the whole scorer. A question above a budget is refused with the reason, and its client asks again.

Turns go round the keys, and for each key round its connections. So a connection with many questions delays another's
single question by about one batch. A batch is limited by number, by the bytes of its answers, and by the bytes of its
questions, which are chosen so that the batch takes about ``BATCH_S`` seconds.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from async_rl.net.wire import Frame
from async_rl.scorer.client.messages import MAX_PEER_BYTES, MAX_PEER_QUESTIONS

MAX_KEY_BYTES = 512 << 20
"""Budget of one client key. It is half of ``MAX_TOTAL_BYTES``, so one key can't use up the scorer's memory."""
MAX_TOTAL_BYTES = 1 << 30
MAX_BATCH = 512
"""Most questions of one batch. The model divides a batch further, by tokens."""
MAX_BATCH_ANSWER_BYTES = 64 << 20
MIN_BATCH_BYTES, MAX_BATCH_BYTES = 64 << 10, 4 << 20
"""Limits on the bytes of a batch's questions. A token has about 4 bytes as text, and 5 in a sequence."""
BATCH_S = 2.0
"""How long a batch should take. A shorter one uses a GPU less well; a longer one makes others wait longer."""


@dataclass(slots=True)
class PeerBudget:
    """What one connection holds of its budgets. A connection that begins anew gets a new one."""

    peer: bytes
    key: str
    num_questions: int = 0
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A question of a connection.

    Attributes:
        frame: the encoded question, which is well-formed. Decoded, a text may take many times its size.
        request_id: the id that its answer has.
        budget: the budget of its connection.
        question_bytes: size of the question.
        answer_bytes: size of the answer that it asks for, as ``scoring.messages.answer_bytes`` estimates it.
    """

    frame: Frame
    request_id: int
    budget: PeerBudget
    question_bytes: int
    answer_bytes: int

    @property
    def held_bytes(self) -> int:
        return self.question_bytes + self.answer_bytes


@dataclass(slots=True)
class _Turns:
    """The waiting questions by key, then by connection. The next turn is that of the first key and connection."""

    by_key: OrderedDict[str, OrderedDict[bytes, deque[Question]]] = field(default_factory=OrderedDict)

    def __bool__(self) -> bool:
        return bool(self.by_key)

    def add(self, question: Question) -> None:
        peers = self.by_key.setdefault(question.budget.key, OrderedDict())
        peers.setdefault(question.budget.peer, deque()).append(question)

    def first(self) -> Question:
        peers = next(iter(self.by_key.values()))
        return next(iter(peers.values()))[0]

    def pop(self) -> Question:
        key, peers = next(iter(self.by_key.items()))
        peer, questions = next(iter(peers.items()))
        question = questions.popleft()
        peers.move_to_end(peer)
        self.by_key.move_to_end(key)
        if not questions:
            self._remove(key, peer)
        return question

    def remove(self, budget: PeerBudget) -> Iterable[Question]:
        """Remove and return the questions of a connection."""
        questions = self.by_key.get(budget.key, {}).get(budget.peer, ())
        if questions:
            self._remove(budget.key, budget.peer)
        return questions

    def _remove(self, key: str, peer: bytes) -> None:
        del self.by_key[key][peer]
        if not self.by_key[key]:
            del self.by_key[key]


class WaitingQuestions:
    """The questions that wait for the model. Thread-safe: one thread admits questions, another takes batches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns = _Turns()
        self._by_key: Counter[str] = Counter()
        self._batch_bytes = MIN_BATCH_BYTES
        self.held_bytes = 0

    def admit(self, question: Question) -> str:
        """Add a question. Return why it is refused for now; empty if it is admitted."""
        with self._changed:
            if refusal := self._over_budget(question):
                return refusal
            self._hold(question, 1)
            self._turns.add(question)
            self._changed.notify_all()
        return ""

    def take(self, timeout_s: float) -> list[Question]:
        """Remove and return the next batch. Wait for a question at most ``timeout_s``; then the batch is empty."""
        batch: list[Question] = []
        with self._changed:
            self._changed.wait_for(lambda: bool(self._turns), timeout_s)
            question_bytes = answer_bytes = 0
            while self._turns and len(batch) < MAX_BATCH:
                question = self._turns.first()
                question_bytes += question.question_bytes
                answer_bytes += question.answer_bytes
                if batch and (question_bytes > self._batch_bytes or answer_bytes > MAX_BATCH_ANSWER_BYTES):
                    break
                batch.append(self._turns.pop())
        return batch

    def note_batch(self, batch: Iterable[Question], elapsed_s: float) -> None:
        """Choose the size of the next batches by how long this one took."""
        num_bytes = sum(question.question_bytes for question in batch)
        fitting = num_bytes * BATCH_S / max(elapsed_s, 1e-6)
        with self._changed:
            self._batch_bytes = round(min(max(fitting, MIN_BATCH_BYTES), MAX_BATCH_BYTES))

    def release(self, question: Question) -> None:
        """Give back what a question held: its answer has left the process, or nobody wants it."""
        with self._changed:
            self._hold(question, -1)

    def forget(self, budget: PeerBudget) -> None:
        """Remove the questions of a connection that has ended."""
        with self._changed:
            for question in self._turns.remove(budget):
                self._hold(question, -1)

    def _hold(self, question: Question, sign: int) -> None:
        budget, num_bytes = question.budget, sign * question.held_bytes
        budget.num_questions += sign
        budget.held_bytes += num_bytes
        self.held_bytes += num_bytes
        self._by_key[budget.key] += num_bytes
        if not self._by_key[budget.key]:
            del self._by_key[budget.key]

    def _over_budget(self, question: Question) -> str:
        budget, size = question.budget, question.held_bytes
        if budget.num_questions >= MAX_PEER_QUESTIONS:
            return (
                f"expected at most {MAX_PEER_QUESTIONS} questions of one connection without a read answer, got one "
                f"more; read the answers, then ask again"
            )
        if budget.num_questions and budget.held_bytes + size > MAX_PEER_BYTES:
            return (
                f"expected questions and answers of at most {MAX_PEER_BYTES} bytes of one connection, got "
                f"{budget.held_bytes + size} with this question; read the answers, then ask again"
            )
        if self._by_key[budget.key] + size > MAX_KEY_BYTES or self.held_bytes + size > MAX_TOTAL_BYTES:
            return (
                f"the scorer has no room for questions and answers of {size} bytes at present: all clients hold "
                f"{self.held_bytes} of {MAX_TOTAL_BYTES} bytes, and those with this key {self._by_key[budget.key]} of "
                f"{MAX_KEY_BYTES}; ask again"
            )
        return ""
