"""Scores rows with the policy: the summed log-probabilities of their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from async_rl.extensions.offline.slopes import sequence_sums
from async_rl.learner.interface import Engine
from async_rl.learner.sequences import TrainSequence

T = TypeVar("T")

ROWS_PER_CHUNK = 256
"""Number of rows that are sent to the ranks together where there are many."""


def chunks_of(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield ``rows`` in chunks of ``ROWS_PER_CHUNK``."""
    for start in range(0, len(rows), ROWS_PER_CHUNK):
        yield rows[start : start + ROWS_PER_CHUNK]


def summed_logprobs(engine: Engine, rows: Sequence[Sequence[TrainSequence]]) -> list[list[float]]:
    """Return the sum of the log-probabilities of each sequence's trained tokens, in nats, row by row; of a value
    model, of the values there. Rows have equally many sequences.
    """
    sequences = numbered([sequence for row in rows for sequence in row])
    sums = sequence_sums(sequences, engine.score_policy(sequences))
    return sums.view(len(rows), -1).tolist()


def summed_in_chunks(engine: Engine, rows: Sequence[Sequence[TrainSequence]]) -> list[list[float]]:
    """Return ``summed_logprobs`` of any number of rows."""
    return [sums for chunk in chunks_of(rows) for sums in summed_logprobs(engine, chunk)]


def numbered(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the sequences with ids that are unique: a step may hold a row twice, and a row may have two sequences."""
    return [replace(sequence, sequence_id=number) for number, sequence in enumerate(sequences)]
