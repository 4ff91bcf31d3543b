"""Evaluations: every row of a dataset sampled once (``num_samples`` answers each), their answers held until received.

Pure, and a part of the buffer, which owns the leases. An evaluation has a ledger of its own and does not count in
admission. A row that can't be sampled is answered with a group without rollouts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_rl.records import Prompt, Sampling


class Row(Protocol):
    """One dataset row."""

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]: ...
    @property
    def reward_data(self) -> Mapping[str, Any]: ...


EvalKey = tuple[str, int]
"""Dataset name and the learner's step."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One row's encoded group, and what the ledger knows of it."""

    body: bytes
    rollouts: int
    tokens: int


@dataclass(slots=True)
class Evaluation:
    """One dataset at one step. ``todo`` are rows without lease or answer; an answer of None could not be sampled."""

    key: EvalKey
    rows: Sequence[Row]
    num_samples: int
    sampling: Sampling
    min_version: int
    exclusive: bool
    todo: list[int] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    answers: dict[int, Answer | None] = field(default_factory=dict)
    delivered: bool = False

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self.rows)

    def prompt(self, row: int) -> Prompt:
        return Prompt(row, row, 0, self.rows[row].messages, self.rows[row].reward_data)

    def give_back(self, row: int) -> None:
        """A row's lease ended by nobody's fault."""
        heapq.heappush(self.todo, row)

    def lose(self, row: int, *, max_attempts: int, again: bool) -> bool:
        """A row's lease ended without an answer; whether it is given up."""
        self.attempts[row] += 1
        if again and self.attempts[row] < max_attempts:
            heapq.heappush(self.todo, row)
            return False
        self.answers[row] = None
        return True

    @property
    def progress_line(self) -> str:
        return f"{self.key[0]} at step {self.key[1]}: {len(self.answers)} of {len(self.rows)} rows"


class EvalBook:
    """The evaluations that were asked for and not yet received."""

    def __init__(self) -> None:
        self._open: dict[EvalKey, Evaluation] = {}
        self._received: set[EvalKey] = set()

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self._open.values())

    def add(self, evaluation: Evaluation) -> bool:
        """Ask for an evaluation; whether it is new."""
        if evaluation.key in self._open or evaluation.key in self._received:
            return False
        evaluation.todo = list(range(len(evaluation.rows)))
        self._open[evaluation.key] = evaluation
        return True

    def get(self, key: EvalKey) -> Evaluation | None:
        return self._open.get(key)

    def confirm(self, key: EvalKey) -> Evaluation | None:
        """The learner has it: forget it. None if it is not here (any more)."""
        evaluation = self._open.get(key)
        if evaluation is None or not evaluation.done:
            return None
        self._received.add(key)
        return self._open.pop(key)

    def clear(self) -> list[Evaluation]:
        """A new learner asks anew."""
        dropped, self._open, self._received = list(self._open.values()), {}, set()
        return dropped

    @property
    def finished(self) -> list[Evaluation]:
        return [e for e in self._open.values() if e.done]

    @property
    def unfinished(self) -> list[Evaluation]:
        return [e for e in self._open.values() if not e.done]

    @property
    def exclusive(self) -> Evaluation | None:
        """An unfinished evaluation that no training lease may overtake."""
        return next((e for e in self.unfinished if e.exclusive), None)

    @property
    def num_bytes(self) -> int:
        return sum(len(a.body) for e in self._open.values() for a in e.answers.values() if a is not None)
