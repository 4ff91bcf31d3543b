"""What a step minimises, and its sums: one micro-batch in, a loss to backpropagate and numbers to add up out.

Every number is a sum over trained tokens with its count beside it, so micro-batches and ranks just add up, and the
statistics are the same for any cut. Called by ``fsdp_engine.py`` on every rank. N = trained tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from async_rl.config import LossConfig
from async_rl.learner.engine import UpdateStats
from async_rl.learner.logprobs import TokenLogprobs
from async_rl.learner.loss import dapo_loss, mismatch_by_lag, nll_loss
from async_rl.learner.model import DeviceBatch

# The fixed part of ``MicroBatchResult.sums``; what is behind it is mismatch by lag, KL sums then token counts.
SUM_NAMES = (
    "denominator", "loss", "tokens", "skipped_tokens", "clipped", "ratio", "ratio_square", "abs_log_ratio", "entropy",
)  # fmt: skip


class MicroBatchResult(NamedTuple):
    """``sums`` is float64 on the batch's device, and as long on every rank and in every micro-batch."""

    loss_sum: Tensor  # [], float64, carries grad: the step's loss times its denominator, this part of it
    sums: Tensor  # float64 [len(SUM_NAMES) + 2 * lags]
    skipped: Tensor  # bool [S]
    ratio_max: Tensor  # [], float64


class Objective(Protocol):
    """A loss that is a sum over trained tokens divided by a denominator known only after the whole step."""

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult: ...


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """DAPO's policy loss. ``max_lag`` is the last staleness with a mismatch of its own."""

    loss: LossConfig
    max_lag: int

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        out = dapo_loss(
            scored.logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            batch.sequence_index,
            batch.num_sequences,
            clip_low=self.loss.clip_low,
            clip_high=self.loss.clip_high,
            skip_threshold=self.loss.skip_threshold,
        )
        mismatch = mismatch_by_lag(
            scored.logprobs.detach(), batch.behavior_logprobs, batch.versions, version, self.max_lag
        )
        kept_N = ~out.skipped[batch.sequence_index]
        entropy = scored.entropies.masked_fill(~kept_N, 0.0).sum(dtype=torch.float64)
        sums = torch.stack(
            [
                out.num_tokens.double(),
                out.loss_sum.detach(),
                out.num_tokens.double(),
                out.num_skipped_tokens.double(),
                (out.num_clipped_low + out.num_clipped_high).double(),
                out.ratio_sum,
                out.ratio_square_sum,
                out.abs_log_ratio_sum,
                entropy,
            ]
        )
        sums = torch.cat([sums, mismatch.kl_sum, mismatch.num_tokens.double()])
        return MicroBatchResult(out.loss_sum, sums, out.skipped, out.ratio_max)


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """Negative log-likelihood; it skips nothing, and knows no behavior policy."""

    aggregation: Literal["token", "sequence"]

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        out = nll_loss(scored.logprobs, batch.sequence_index, batch.num_sequences, aggregation=self.aggregation)
        sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=scored.logprobs.device)
        sums[:3] = torch.stack([out.weight_sum, out.loss_sum.detach(), out.num_tokens.double()])
        sums[-1] = scored.entropies.sum(dtype=torch.float64)
        nothing = torch.zeros(batch.num_sequences, dtype=torch.bool, device=sums.device)
        return MicroBatchResult(out.loss_sum, sums, nothing, sums.new_zeros(()))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of the optimizer step. ``grad_norm`` is before clipping, of the mean loss."""

    reason: str
    grad_norm: float
    lr: float


def update_stats(
    sums: Tensor, ratio_max: float, skipped_sequence_ids: Sequence[int], outcome: StepOutcome
) -> UpdateStats:
    """Statistics of a step from its sums over micro-batches and ranks (host, float64)."""
    total = dict(zip(SUM_NAMES, sums.tolist()))
    tokens = total["tokens"]
    count = max(1.0, tokens)
    ess = total["ratio"] ** 2 / (count * total["ratio_square"]) if total["ratio_square"] > 0 else 1.0
    kl_sums, kl_tokens = sums[len(SUM_NAMES) :].reshape(2, -1).tolist()
    return UpdateStats(
        stepped=not outcome.reason,
        reason=outcome.reason,
        loss=total["loss"] / total["denominator"] if total["denominator"] else 0.0,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        tokens_trained=int(tokens),
        ratio_mean=total["ratio"] / count,
        ratio_max=ratio_max,
        clip_fraction=total["clipped"] / count,
        ess=ess,
        entropy=total["entropy"] / count,
        mean_abs_log_ratio=total["abs_log_ratio"] / count,
        skipped_sequence_ids=tuple(skipped_sequence_ids),
        skipped_tokens=int(total["skipped_tokens"]),
        mismatch_kl={lag: (kl, int(n)) for lag, (kl, n) in enumerate(zip(kl_sums, kl_tokens)) if n},
    )
