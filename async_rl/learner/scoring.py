"""Score a batch by the reference model and the proximal policy, if the loss needs their log-probabilities.

The trainer calls this on rank 0. The engine does the forward passes on all ranks; scores that the settings do not use
are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from async_rl.config.loss import LossConfig
from async_rl.learner.batch import PreparedBatch
from async_rl.learner.engine.protocol import Engine
from async_rl.learner.packing import TrainSequence

Logprobs = Mapping[int, np.ndarray]
"""Sequence id to float32 [N], nats, over the trained tokens of that sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities of every trained sequence; None if the loss does not need them."""

    reference: Logprobs | None = None
    proximal: Logprobs | None = None


def score(prepared: PreparedBatch, engine: Engine, loss: LossConfig) -> Scores:
    """Score all updates of the batch at once: the proximal policy is the one before the *batch's* first update."""
    sequences = [sequence for update in prepared.updates for sequence in update]
    if not sequences:
        return Scores()
    return Scores(
        reference=engine.score(sequences, of="reference") if loss.needs_reference else None,
        proximal=engine.score(sequences, of="policy") if loss.needs_proximal else None,
    )


def with_scores(prepared: PreparedBatch, scores: Scores) -> PreparedBatch:
    """``prepared`` with ``scores`` along the tokens of its sequences."""
    if scores.reference is None and scores.proximal is None:
        return prepared
    updates = tuple(tuple(_with_scores(s, scores) for s in update) for update in prepared.updates)
    return replace(prepared, updates=updates)


def _with_scores(sequence: TrainSequence, scores: Scores) -> TrainSequence:
    return replace(
        sequence,
        reference_logprobs=_along_tokens(sequence, scores.reference),
        proximal_logprobs=_along_tokens(sequence, scores.proximal),
    )


def _along_tokens(sequence: TrainSequence, logprobs: Logprobs | None) -> np.ndarray:
    """float32 [T], 0 off the loss mask; [0] without ``logprobs``."""
    if logprobs is None:
        return np.zeros(0, dtype=np.float32)
    along = np.zeros(len(sequence.token_ids), dtype=np.float32)
    along[sequence.loss_mask] = logprobs[sequence.sequence_id]
    return along
