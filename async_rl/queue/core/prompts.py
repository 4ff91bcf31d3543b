"""The prompts to sample: the stream of training prompts, and the rows of evaluations.

A prompt's position in the stream counts from 0 over all epochs. A ``mixture.Mixture`` says from which source of rows it
comes. The rows of each epoch of a source are shuffled with a seed, so a position alone determines its row, also after a
restart. Under a ``curriculum.Curriculum`` the stream passes over rows, and the place of each drawn prompt in the order
of its source is recorded until the prompt has ended. ``generator_requests`` draws positions. Positions whose lease
expired, or whose group was dropped or rolled back, are drawn again before new ones.

The learner can request an evaluation of all rows of a dataset. The queue keeps the answers until the learner has
received them. Evaluations have their own ledger, and don't count for the number of training leases. A row that can't be
sampled gets an answer without a group.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from async_rl.config.config import Config
from async_rl.config.data import CurriculumConfig
from async_rl.queue.core.curriculum import Curriculum
from async_rl.queue.core.failures import Attempts, EvalKey
from async_rl.queue.core.mixture import Mixture
from async_rl.queue.storage.journal import Changes
from async_rl.queue.storage.payloads import PayloadRef, PayloadStore
from async_rl.records import Prompt, Sampling


class Row(Protocol):
    """A row of a dataset: the messages of its prompt, the data that its reward needs, and the name of its source."""

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]: ...
    @property
    def reward_data(self) -> Mapping[str, Any]: ...
    @property
    def source(self) -> str: ...


# The training prompts.


class StreamCursor(msgspec.Struct):
    """The place in the stream of training prompts, as the journal and snapshots store it.

    ``position`` is the lowest position that was never drawn. ``requeued`` is a heap of the positions to draw again
    first. ``aside`` and ``thinned`` are the numbers of rows of each source that a curriculum has passed over, by cause.
    """

    position: int = 0
    requeued: list[int] = []
    aside: Counter[int] = msgspec.field(default_factory=Counter)
    thinned: Counter[int] = msgspec.field(default_factory=Counter)

    def num_passed(self, source: int) -> int:
        """Return how many rows of ``source`` were passed over."""
        return self.aside[source] + self.thinned[source]


class PromptStream:
    """The order in which training prompts are sampled, as positions. The stream has no end if ``epochs`` is None.

    By default all rows are one source. With ``weights``, the rows are those of several sources, one source after the
    other, with ``sizes`` rows each. Sources take turns by their weights. A curriculum may pass over rows. The sources'
    shares of the drawn prompts stay the same, and an epoch of a source has the rows that were passed over, too.

    Raises:
        ValueError: ``num_rows`` is below 1.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        weights: Sequence[int] = (1,),
        sizes: Sequence[int] = (),
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"data.train: expected at least one row, got {num_rows}; add rows to it")
        self.num_rows = num_rows
        self._seed, self._shuffle = seed, shuffle
        self._mixture = Mixture(sizes or (num_rows,), weights)
        self._first_rows = [0, *itertools.accumulate(self._mixture.sizes)]
        self._epochs, self._end = epochs, 0 if epochs is None else self._mixture.end_of(epochs)
        self.cursor = StreamCursor()
        self.curriculum = Curriculum(curriculum or CurriculumConfig(), num_rows, seed=seed)
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    @classmethod
    def of_config(cls, config: Config, rows: Sequence[Row]) -> PromptStream:
        """Make the stream of the training rows of ``config``."""
        sizes = Counter(row.source for row in rows) if config.data.weights else {}
        return cls(
            len(rows), seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.data.epochs,
            weights=[config.data.weights[source] for source in sizes] or (1,), sizes=list(sizes.values()),
            curriculum=config.data.curriculum,
        )  # fmt: skip

    @property
    def most_prompts_left(self) -> float:
        """Limit on the number of prompts that may still be drawn; infinite if the stream has no end.

        A curriculum may pass over some of them.
        """
        if self._epochs is None:
            return math.inf
        return (0 if self.is_at_end else self._end - self.position) + self.num_requeued

    @property
    def position(self) -> int:
        """The lowest position that was never drawn."""
        return self.cursor.position

    @property
    def requeued(self) -> list[int]:
        """The positions that will be drawn again, ascending."""
        return sorted(self.cursor.requeued)

    @property
    def num_requeued(self) -> int:
        return len(self.cursor.requeued)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the newest prompt drawn from the source whose epoch is the lowest; 0 if none was."""
        return min(self._epoch(source) for source in range(len(self._mixture.sizes)))

    @property
    def has_sources(self) -> bool:
        """Whether the rows are those of several sources that take turns."""
        return len(self._mixture.sizes) > 1

    @property
    def exhausted(self) -> bool:
        """Whether there is no position left to draw."""
        return not self.cursor.requeued and self.is_at_end

    @property
    def is_at_end(self) -> bool:
        """Whether all new positions are drawn."""
        if self._epochs is None:
            return False
        if not self.num_passed:
            return self.cursor.position >= self._end
        sizes = self._mixture.sizes
        return all(self._next_index(source) >= self._epochs * size for source, size in enumerate(sizes))

    @property
    def num_passed(self) -> int:
        """The number of rows that a curriculum has passed over, each as often as it was."""
        return self.cursor.aside.total() + self.cursor.thinned.total()

    @property
    def row_epochs(self) -> np.ndarray:
        """The epoch of its source for each row, int64 [rows]."""
        sizes = self._mixture.sizes
        return np.repeat([self._epoch(source) for source in range(len(sizes))], sizes)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the dataset row of a position, and the epoch of its source.

        Under a curriculum, the position must be that of a prompt that was drawn and has not ended.
        """
        source, index = self._mixture.locate(position)
        place = self.curriculum.places.get(position)
        return self._row(source, index if place is None else place.index)

    def draw(
        self, avoid: Callable[[int], bool] = lambda position: False, tries: Callable[[int], int] = lambda position: 0
    ) -> int | None:
        """Return the next position to sample; None at the end of the last epoch.

        Requeued positions come first, but those that ``avoid`` names come last, the one with the fewest ``tries``
        first. Rows that the curriculum passes over are counted in the cursor, also if None is returned.
        """
        found = pop_first(self.cursor.requeued, avoid)
        if found is None:
            found = self._draw_new()
        return pop_least(self.cursor.requeued, tries) if found is None and self.cursor.requeued else found

    def _draw_new(self) -> int | None:
        position = self.cursor.position
        source = self._mixture.locate(position)[0]
        while not self.is_at_end:
            index = self._next_index(source)
            verdict = self.curriculum.verdict(*self._row(source, index), source, index)
            if verdict == "sampled":
                if self.cursor.num_passed(source):
                    self.curriculum.open_place(position, index)
                self.cursor.position += 1
                return position
            (self.cursor.aside if verdict == "aside" else self.cursor.thinned)[source] += 1
        return None

    def observe(self, position: int, rate: float) -> None:
        """Record the mean accuracy of the group of the prompt at ``position`` for the curriculum."""
        if self.curriculum.is_on:
            self.curriculum.observe(*self.locate(position), rate)

    def _next_index(self, source: int) -> int:
        """Return the place, in the order of ``source``, of the first row that was neither drawn nor passed over."""
        return self._mixture.count(source, self.cursor.position) + self.cursor.num_passed(source)

    def _epoch(self, source: int) -> int:
        return max(0, self._next_index(source) - 1) // self._mixture.sizes[source]

    def _row(self, source: int, index: int) -> tuple[int, int]:
        epoch, place = divmod(index, self._mixture.sizes[source])
        return self._first_rows[source] + int(self._order(source, epoch)[place]), epoch

    def requeue(self, position: int) -> None:
        """Put a position back, to be drawn again before new positions."""
        heapq.heappush(self.cursor.requeued, position)

    def _order(self, source: int, epoch: int) -> np.ndarray:
        order = self._orders.get((source, epoch))
        if order is None:
            rows = np.arange(self._mixture.sizes[source])
            seed = (self._seed, epoch, source) if source else (self._seed, epoch)
            order = np.random.default_rng(seed).permutation(rows) if self._shuffle else rows
            # Positions in use span a few epochs at most, unless the data set is smaller than the queue.
            while len(self._orders) >= 8 * len(self._mixture.sizes):
                del self._orders[next(iter(self._orders))]
            self._orders[source, epoch] = order
        return order


def pop_first(heap: list[int], avoid: Callable[[int], bool]) -> int | None:
    """Remove and return the lowest number of a heap that ``avoid`` does not name; None if there is none."""
    avoided: list[int] = []
    while heap and avoid(heap[0]):
        avoided.append(heapq.heappop(heap))
    found = heapq.heappop(heap) if heap else None
    for number in avoided:
        heapq.heappush(heap, number)
    return found


def pop_least(heap: list[int], tries: Callable[[int], int]) -> int:
    """Remove and return the number of a heap that has the fewest ``tries``, the lowest of several.

    So each of them gets its turn: the lowest one may fail for ever, and the others only during an outage.
    """
    found = min(heap, key=lambda number: (tries(number), number))
    heap.remove(found)
    heapq.heapify(heap)
    return found


# Evaluations.


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
        """Put a row back whose lease ended without a failure. This does not count as a failed attempt."""
        heapq.heappush(self.todo, row)

    def take_row(self, avoid: Callable[[int], bool]) -> int:
        """Remove and return the first row of ``todo``; those that ``avoid`` names come last, the least tried first."""
        found = pop_first(self.todo, avoid)
        return pop_least(self.todo, lambda row: self.attempts(row).tries) if found is None else found

    def attempts(self, row: int) -> Attempts:
        """Return the failed attempts to sample a row, to be changed."""
        return self.request.attempts.setdefault(row, Attempts())

    def lose(self, row: int, *, max_attempts: int, requeue: bool) -> bool:
        """Put a row back whose attempt failed, or return True if it must be given up.

        A row is given up after ``max_attempts`` failed attempts, or at once if ``requeue`` is False.
        """
        if requeue and self.attempts(row).failed < max_attempts:
            heapq.heappush(self.todo, row)
            return False
        return True

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
        self._changes.delete("answer", entry_key(evaluation.key, row))
        if answer.ref is not None:
            self.num_bytes -= answer.ref.disk_bytes
            self._payloads.release(answer.ref)
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
            self._changes.delete("answer", entry_key(evaluation.key, row))
            if answer.ref is not None:
                self.num_bytes -= answer.ref.disk_bytes
                self._payloads.release(answer.ref)
