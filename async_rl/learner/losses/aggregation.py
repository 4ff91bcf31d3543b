"""Aggregations: how much every kept token counts, and the denominator for it. Pure; called by ``policy.py``.

The denominator of a step is a sum over micro-batches and ranks, known only after the last one. So a weight must not
depend on anything outside its own sequence; a sequence is never cut. N = trained tokens, S = sequences. A new
aggregation is a function here with a row in ``FUNCTIONS``, and a row in ``config.loss.AGGREGATIONS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from async_rl.config.section import look_up
from async_rl.learner.losses.ratio import sum_by


class Weights(NamedTuple):
    """The step's loss is the sum of ``weight * loss of the token`` over the sum of ``denominator``."""

    weight: Tensor | float  # float64 [N], or one for all
    denominator: Tensor  # [], int64


def aggregate(
    kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, aggregation: str, *, max_length: int
) -> Weights:
    """Weights of the kept tokens (bool [N]), by the function of the name ``aggregation``.

    Sequences without a kept token are in no denominator.
    """
    function = look_up(FUNCTIONS, aggregation, "loss.aggregation")
    return function(kept_N, sequence_index_N, num_sequences, max_length)


def token_mean(kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, max_length: int) -> Weights:
    """The mean over all kept tokens of the step (DAPO, arXiv:2503.14476 eq. 8)."""
    return Weights(1.0, kept_N.sum())


def sequence_mean(kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, max_length: int) -> Weights:
    """The mean over sequences of the mean over their kept tokens (GRPO, arXiv:2402.03300 eq. 3)."""
    counts_S = sum_by(sequence_index_N, kept_N.long(), num_sequences)
    return Weights(1.0 / counts_S.clamp(min=1)[sequence_index_N].double(), (counts_S > 0).sum())


def sequence_sum(kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, max_length: int) -> Weights:
    """The mean over sequences of the sum over their kept tokens, divided by ``max_length``, the same for all.

    Dr. GRPO (arXiv:2503.20783); RLOO's sum (arXiv:2402.14740), but for that constant.
    """
    counts_S = sum_by(sequence_index_N, kept_N.long(), num_sequences)
    return Weights(1.0 / max_length, (counts_S > 0).sum())


FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor, int, int], Weights]] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "sequence_sum": sequence_sum,
}
"""``loss.aggregation`` -> kept [N], sequence index [N], number of sequences, ``sampling.max_new_tokens`` -> weights."""
