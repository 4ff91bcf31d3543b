"""Evaluations of data sets that the learner requested: their rows, answers and records.

An evaluation samples all rows of a data set. The queue keeps the answers until the learner has received them.
Evaluations have their own ledger, and don't count for the number of training leases. A row that can't be sampled gets
an answer without a group.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from async_rl.queue.core.failures import Attempts, EvalKey
from async_rl.queue.core.prompts import Row, pop_first, pop_least
from async_rl.queue.storage.journal import Changes
from async_rl.queue.storage.payloads import PayloadRef, PayloadStore
from async_rl.records import Prompt, Sampling


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The answer to one row of an evaluation: the place of its group's bytes, and its numbers for the ledger.

    ``ref`` is None if the row could not be sampled.
    """

    ref: PayloadRef | None
    rollouts: int = 0
    tokens: int = 0


class EvaluationRecord(msgspec.Struct):
    """An evaluation that the learner requested, as the journal stores it.

    Attributes:
        dataset: the name of the set in ``data.eval``.
        step: the learner's step that requested it.
        num_samples: the number of rollouts for each row.
        min_version: the oldest weights version that may sample it.
        exclusive: whether no training lease is granted until the evaluation is done.
        attempts: the failed attempts by row.
    """

    dataset: str
    step: int
    num_samples: int
    min_version: int
    exclusive: bool
    attempts: dict[int, Attempts] = {}


@dataclass(slots=True)
class Evaluation:
    """An evaluation of one dataset at one step, with its rows and answers.

    ``todo`` is a heap of the rows that have neither a lease nor an answer. ``answers`` are the answers by row.
    ``delivered`` says whether the answers have been sent to the learner.
    """

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
        """Put a row back, to be sampled again."""
        heapq.heappush(self.todo, row)

    def take_row(self, avoid: Callable[[int], bool]) -> int:
        """Remove and return the first row of ``todo``; those that ``avoid`` names come last, the least tried first."""
        first = pop_first(self.todo, avoid)
        return pop_least(self.todo, lambda row: self.attempts(row).tries) if first is None else first

    def attempts(self, row: int) -> Attempts:
        """Return the failed attempts to sample a row, to be changed."""
        return self.request.attempts.setdefault(row, Attempts())

    @property
    def progress_line(self) -> str:
        """Text that names the evaluation, and says how far it is, such as "test at step 0 (1 of 2 rows)"."""
        return f"{self.key[0]} at step {self.key[1]} ({len(self.answers)} of {len(self.rows)} rows)"


def entry_key(key: EvalKey, row: int | None = None) -> str:
    """Return the key of a record in the journal: the evaluation's, or that of the answer to ``row`` if it is given."""
    return json.dumps([*key] if row is None else [*key, row])


class EvalBook:
    """The evaluations that the learner requested and has not received yet.

    ``num_bytes`` is the size of their answers.
    """

    def __init__(self, changes: Changes, payloads: PayloadStore) -> None:
        self._changes, self._payloads = changes, payloads
        self._open: dict[EvalKey, Evaluation] = {}
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self._open.values())

    def add(self, evaluation: Evaluation) -> bool:
        """Add an evaluation. Return False, and change nothing, if it is already present."""
        if evaluation.key in self._open:
            return False
        evaluation.todo = [row for row in range(len(evaluation.rows)) if row not in evaluation.answers]
        self._open[evaluation.key] = evaluation
        self.note(evaluation)
        return True

    def get(self, key: EvalKey) -> Evaluation | None:
        return self._open.get(key)

    def note(self, evaluation: Evaluation) -> None:
        """Write an evaluation, with its failed attempts, to the journal."""
        self._changes.put("evaluation", entry_key(evaluation.key), evaluation.request)

    def answer(self, evaluation: Evaluation, row: int, answer: Answer) -> None:
        """Store the answer to a row. An answer without a group says that the row was given up."""
        evaluation.answers[row] = answer
        self.num_bytes += answer.ref.disk_bytes if answer.ref is not None else 0
        self._changes.put("answer", entry_key(evaluation.key, row), answer)

    def lose_answer(self, evaluation: Evaluation, row: int) -> Answer:
        """Remove and return the answer to a row because its stored bytes are damaged. The row is sampled again."""
        answer = evaluation.answers.pop(row)
        evaluation.give_back(row)
        self._delete_answer(evaluation.key, row, answer)
        return answer

    def __contains__(self, key: EvalKey) -> bool:
        """Return whether the evaluation runs, or is finished and the learner has not received it."""
        return key in self._open

    def confirm(self, key: EvalKey) -> Evaluation | None:
        """Delete and return an evaluation that the learner has received; None if it is unknown or not finished."""
        evaluation = self._open.get(key)
        if evaluation is None or not evaluation.done:
            return None
        self._forget(evaluation)
        return evaluation

    def clear(self) -> None:
        """Delete all evaluations. A new learner requests its evaluations again."""
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
        """An unfinished evaluation that stops training leases until it is done; None if there is none."""
        return next((e for e in self.unfinished if e.request.exclusive), None)

    def _forget(self, evaluation: Evaluation) -> None:
        del self._open[evaluation.key]
        self._changes.delete("evaluation", entry_key(evaluation.key))
        for row, answer in evaluation.answers.items():
            self._delete_answer(evaluation.key, row, answer)

    def _delete_answer(self, key: EvalKey, row: int, answer: Answer) -> None:
        self._changes.delete("answer", entry_key(key, row))
        if answer.ref is not None:
            self.num_bytes -= answer.ref.disk_bytes
            self._payloads.release(answer.ref)
