"""How much every kept token counts, and the denominator that goes with it. Pure; called by ``policy.py``.

The denominator of a step is the sum over micro-batches and ranks, known only after the last, so weights must not
depend on anything outside their own sequence. A sequence is never cut. N = trained tokens, S = sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from async_rl.config.loss import Aggregation
from async_rl.learner.losses.ratio import sum_by


class Weights(NamedTuple):
    """The step's loss is the sum of ``weight * loss of the token`` over the sum of ``denominator``."""

    weight: Tensor | float  # float64 [N], or one for all
    denominator: Tensor  # [], int64


def aggregate(
    kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, aggregation: Aggregation, *, max_length: int
) -> Weights:
    """Weights of the kept tokens (bool [N]).

    - ``token``: the mean over all kept tokens of the step (DAPO, arXiv:2503.14476 eq. 8).
    - ``sequence``: the mean over sequences of the mean over their kept tokens (GRPO, arXiv:2402.03300 eq. 3).
    - ``sequence_sum``: the mean over sequences of the sum over their kept tokens, divided by ``max_length``, the same
      for all (Dr. GRPO, arXiv:2503.20783; RLOO's sum, arXiv:2402.14740, but for that constant).

    Sequences without a kept token are in no denominator.
    """
    if aggregation == "token":
        return Weights(1.0, kept_N.sum())
    counts_S = sum_by(sequence_index_N, kept_N.long(), num_sequences)
    num_kept = (counts_S > 0).sum()
    if aggregation == "sequence_sum":
        return Weights(1.0 / max_length, num_kept)
    return Weights(1.0 / counts_S.clamp(min=1)[sequence_index_N].double(), num_kept)
