"""What a loss reads of a micro-batch, and what the model computed for its tokens. N = trained tokens, C = some of them,
K = other tokens of the vocabulary at the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from async_rl.learner.sequences import TokenColumns


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossBatch(TokenColumns[Tensor]):
    """The trained tokens of a micro-batch on the model's device. Fields with the same name are as in ``MicroBatch``.

    ``num_sequences`` is S. ``is_finite``: whether all ``behavior_logprobs`` are finite, which the host would have to
    wait for the device to see.
    """

    after_update: Tensor
    sequence_index: Tensor
    num_sequences: int
    is_finite: bool = False


class TokenLogprobs(NamedTuple):
    """The log-probabilities and entropies of ``token_logprobs``: float32 [N], nats, under the sampling distribution.

    ``others`` are the log-probabilities of other tokens at the same places, float32 [N, K]. None if none were asked
    for.
    """

    logprobs: Tensor
    entropies: Tensor
    others: Tensor | None = None


class Slopes(NamedTuple):
    """Derivatives of a loss by log-probabilities and by entropies, float32 [C] each, and by the log-probabilities of
    other tokens, float32 [C, K]. ``entropies`` and ``others`` are None if the loss does not depend on them.
    """

    logprobs: Tensor
    entropies: Tensor | None = None
    others: Tensor | None = None


SlopeFunction = Callable[[slice, TokenLogprobs], Slopes]
"""Predicts the slopes of some of the N tokens (their place in N) from their values [C], which carry no gradient."""
IndexedSlopeFunction = Callable[[slice | Tensor, TokenLogprobs], Slopes]
"""A ``SlopeFunction`` that also takes int64 indices [C] as places in N."""
