"""The prompts to sample: the stream of training prompts, and the rows of evaluations. Pure.

The stream's positions count from 0 over all epochs. Every epoch is a seeded order of all rows, so a position alone
determines its row, also after a restart. ``generator_requests`` draws positions; requeued ones (expired, dropped,
rolled back) are drawn first, in stream order.

The learner requests an evaluation of every row of a dataset. Its answers are kept until the learner has received them.
Evaluations have a separate ledger, and do not count for admission. A row that can't be sampled has an answer without
a group.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from async_rl.queue.storage.journal import Changes
from async_rl.queue.storage.payloads import PayloadRef, PayloadStore
from async_rl.records import Prompt, Sampling


class Row(Protocol):
    """One dataset row."""

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]: ...
    @property
    def reward_data(self) -> Mapping[str, Any]: ...


# The training prompts.


class StreamCursor(msgspec.Struct):
    """The state of a stream.

    ``position`` is the lowest that was never drawn. ``requeued`` is a heap of positions that are drawn again first.
    """

    position: int = 0
    requeued: list[int] = []


class PromptStream:
    """Positions to sample, in order. If ``epochs`` is None, the stream is endless.

    Raises:
        ValueError: ``num_rows`` is below 1.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True, epochs: int | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"data.train: expected at least one row, got {num_rows}; add rows to it")
        self.num_rows = num_rows
        self._seed, self._shuffle = seed, shuffle
        self._end = None if epochs is None else epochs * num_rows
        self.cursor = StreamCursor()
        self._orders: dict[int, np.ndarray] = {}

    @property
    def position(self) -> int:
        """The lowest position that was never drawn."""
        return self.cursor.position

    @property
    def requeued(self) -> list[int]:
        """Positions that wait to be drawn again, ascending."""
        return sorted(self.cursor.requeued)

    @property
    def num_requeued(self) -> int:
        return len(self.cursor.requeued)

    @property
    def epoch(self) -> int:
        """The epoch of the newest position drawn (0 before the first)."""
        return max(0, self.cursor.position - 1) // self.num_rows

    @property
    def exhausted(self) -> bool:
        """Whether no position is left to draw."""
        return not self.cursor.requeued and self._end is not None and self.cursor.position >= self._end

    def locate(self, position: int) -> tuple[int, int]:
        """Return (row, epoch) of a position."""
        epoch, index = divmod(position, self.num_rows)
        return int(self._order(epoch)[index]), epoch

    def draw(self) -> int | None:
        """Draw the next position; None at the end of the last epoch."""
        if self.cursor.requeued:
            return heapq.heappop(self.cursor.requeued)
        if self.exhausted:
            return None
        self.cursor.position += 1
        return self.cursor.position - 1

    def requeue(self, position: int) -> None:
        """Draw this position again, before new ones."""
        heapq.heappush(self.cursor.requeued, position)

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            rows = np.arange(self.num_rows)
            order = np.random.default_rng((self._seed, epoch)).permutation(rows) if self._shuffle else rows
            # Positions in use span a few epochs at most, unless the data set is smaller than the queue.
            while len(self._orders) >= 8:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return order


# Evaluations.


EvalKey = tuple[str, int]
"""Dataset name and the learner's step."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The answer to one row: the ref of its group's payload, and its counts for the ledger.

    Without a ``ref`` the row was given up.
    """

    ref: PayloadRef | None
    rollouts: int = 0
    tokens: int = 0


class EvaluationRecord(msgspec.Struct):
    """An evaluation in the journal, with the number of failed attempts by row.

    If it is ``exclusive``, no training lease is granted until it is done.
    """

    dataset: str
    step: int
    num_samples: int
    min_version: int
    exclusive: bool
    attempts: dict[int, int] = {}


@dataclass(slots=True)
class Evaluation:
    """The evaluation of one dataset at one step. ``todo`` is a heap of the rows without lease or answer."""

    request: EvaluationRecord
    rows: Sequence[Row]
    sampling: Sampling
    todo: list[int] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    delivered: bool = False

    @property
    def key(self) -> EvalKey:
        return self.request.dataset, self.request.step

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self.rows)

    def prompt(self, row: int) -> Prompt:
        return Prompt(row, row, 0, self.rows[row].messages, self.rows[row].reward_data)

    def give_back(self, row: int) -> None:
        """Requeue a row whose lease ended without a failure, so that no attempt is counted."""
        heapq.heappush(self.todo, row)

    def lose(self, row: int, *, max_attempts: int, requeue: bool) -> bool:
        """Count a failed attempt at a row. Return whether the row must be given up."""
        attempts = self.request.attempts[row] = self.request.attempts.get(row, 0) + 1
        if requeue and attempts < max_attempts:
            heapq.heappush(self.todo, row)
            return False
        return True

    @property
    def progress_line(self) -> str:
        return f"{self.key[0]} at step {self.key[1]}: {len(self.answers)} of {len(self.rows)} rows"


def entry_key(key: EvalKey, row: int | None = None) -> str:
    """The key of an evaluation's record or, with ``row``, of the record of the answer to that row."""
    return json.dumps([*key] if row is None else [*key, row])


class EvalBook:
    """The evaluations that the learner requested and has not received yet."""

    def __init__(self, changes: Changes, payloads: PayloadStore) -> None:
        self._changes, self._payloads = changes, payloads
        self._open: dict[EvalKey, Evaluation] = {}
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self._open.values())

    def add(self, evaluation: Evaluation) -> bool:
        """Add an evaluation. Return whether it is new."""
        if evaluation.key in self._open:
            return False
        evaluation.todo = [row for row in range(len(evaluation.rows)) if row not in evaluation.answers]
        self._open[evaluation.key] = evaluation
        self.note(evaluation)
        return True

    def get(self, key: EvalKey) -> Evaluation | None:
        return self._open.get(key)

    def note(self, evaluation: Evaluation) -> None:
        """Record the evaluation's attempts in the journal."""
        self._changes.put("evaluation", entry_key(evaluation.key), evaluation.request)

    def answer(self, evaluation: Evaluation, row: int, answer: Answer) -> None:
        """Store a row's answer, which may say that the row was given up."""
        evaluation.answers[row] = answer
        self.num_bytes += answer.ref.length if answer.ref is not None else 0
        self._changes.put("answer", entry_key(evaluation.key, row), answer)

    def lose_answer(self, evaluation: Evaluation, row: int) -> Answer:
        """Remove and return a row's answer, whose payload can't be read back, and requeue the row."""
        answer = evaluation.answers.pop(row)
        evaluation.give_back(row)
        self._changes.delete("answer", entry_key(evaluation.key, row))
        if answer.ref is not None:
            self.num_bytes -= answer.ref.length
            self._payloads.release(answer.ref)
        return answer

    def confirm(self, key: EvalKey) -> Evaluation | None:
        """Delete and return an evaluation that the learner has received; None if it is unknown or not finished."""
        evaluation = self._open.get(key)
        if evaluation is None or not evaluation.done:
            return None
        self._forget(evaluation)
        return evaluation

    def clear(self) -> None:
        """Delete all evaluations. A new learner requests evaluations again."""
        for evaluation in list(self._open.values()):
            self._forget(evaluation)

    @property
    def finished(self) -> list[Evaluation]:
        return [e for e in self._open.values() if e.done]

    @property
    def unfinished(self) -> list[Evaluation]:
        return [e for e in self._open.values() if not e.done]

    @property
    def exclusive(self) -> Evaluation | None:
        """An unfinished exclusive evaluation: until it is done, no training lease is granted. None if there is none."""
        return next((e for e in self.unfinished if e.request.exclusive), None)

    def _forget(self, evaluation: Evaluation) -> None:
        del self._open[evaluation.key]
        self._changes.delete("evaluation", entry_key(evaluation.key))
        for row, answer in evaluation.answers.items():
            self._changes.delete("answer", entry_key(evaluation.key, row))
            if answer.ref is not None:
                self.num_bytes -= answer.ref.length
                self._payloads.release(answer.ref)
