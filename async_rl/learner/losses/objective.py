"""Objectives: what a step minimises. One micro-batch in; a loss to backpropagate and numbers to add up out.

``PolicyObjective`` is for reinforcement learning, ``SupervisedObjective`` for ``async-rl sft``. Every number is a
sum over trained tokens and has its count. So micro-batches and ranks add up, and the statistics are the same for any
cut. ``engine/fsdp_engine.py`` calls this on every rank. N = trained tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.loss import LossConfig
from async_rl.learner.engine import UpdateStats
from async_rl.learner.engine.logprobs import TokenLogprobs
from async_rl.learner.engine.model import DeviceBatch
from async_rl.learner.losses.diagnostics import COLUMNS, Summary, diagnostic_sums, k3_sum_and_tokens, summarise
from async_rl.learner.losses.parts import aggregate, check_shapes
from async_rl.learner.losses.policy import PolicyInputs, policy_loss

SUM_NAMES = ("denominator", "loss", "tokens", "entropy", "reference_kl")
"""The first entries of ``MicroBatchResult.sums``; the rows of ``diagnostic_sums`` follow."""


class MicroBatchResult(NamedTuple):
    """``sums`` has one length on every rank and in every micro-batch."""

    loss_sum: Tensor  # [], float64, carries grad: this micro-batch's part of the step's loss times its denominator
    sums: Tensor  # float64 [len(SUM_NAMES) + COLUMNS * lags]
    skipped: Tensor  # bool [S]
    ratio_max: Tensor  # [], float64


class Objective(Protocol):
    """A loss that is a sum over trained tokens divided by a denominator known only after the whole step."""

    @property
    def needs_entropy_grad(self) -> bool:
        """Whether entropies must carry a gradient."""
        ...

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult: ...

    def why_skip(self, sums: Tensor) -> str:
        """Why the step with these ``sums`` (all micro-batches and ranks) must be skipped; empty: it must not."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The loss of ``[loss]``. ``max_lag`` is the last staleness with diagnostics of its own.

    ``max_length`` is ``sampling.max_new_tokens``, a divisor under ``aggregation = "sequence_sum"``.
    """

    loss: LossConfig
    max_lag: int
    max_length: int

    @property
    def needs_entropy_grad(self) -> bool:
        return self.loss.entropy_coef != 0

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        """As ``Objective``.

        Raises:
            ValueError: a token is newer than ``version``, or as ``policy_loss``.
        """
        lag_N = version - batch.versions.long()
        if bool((lag_N < 0).any()):
            newest = int(batch.versions.max())
            raise ValueError(f"expected tokens of versions up to the learner's {version}, got {newest}")
        inputs = PolicyInputs(
            logprobs=scored.logprobs,
            entropies=scored.entropies,
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            lag=lag_N,
            reference_logprobs=batch.reference_logprobs,
            proximal_logprobs=batch.proximal_logprobs,
        )
        out = policy_loss(inputs, self.loss, max_length=self.max_length)
        entropy = scored.entropies.detach().masked_fill(~out.kept, 0.0).sum(dtype=torch.float64)
        fixed = [out.denominator.double(), out.loss_sum.detach(), out.kept.sum().double(), entropy, out.kl_sum]
        skipped_N = out.skipped[batch.sequence_index]
        by_lag = diagnostic_sums(out, skipped_N, lag_N, self.max_lag + 1, after_update_N=batch.after_update)
        kept_N = out.log_ratio.masked_fill(~out.kept, -torch.inf)
        ratio_max = torch.cat([kept_N, kept_N.new_full((1,), -torch.inf)]).max().exp()
        return MicroBatchResult(out.loss_sum, torch.cat([torch.stack(fixed), by_lag.view(-1)]), out.skipped, ratio_max)

    def why_skip(self, sums: Tensor) -> str:
        return why_skip(sums, self.loss)


class NllOutput(NamedTuple):
    """Sums over one micro-batch; the step's loss is the sum of ``loss_sum`` over that of ``weight_sum``."""

    loss_sum: Tensor  # [], float64, carries grad
    weight_sum: Tensor  # [], float64: tokens, or sequences that have any
    num_tokens: Tensor  # [], int64


def nll_loss(
    logprobs_N: Tensor,
    sequence_index_N: Tensor,
    num_sequences: int,
) -> NllOutput:
    """Negative log-likelihood for supervised training: every token weighs 1.

    Raises:
        ValueError: the two tensors are not both [N].
    """
    check_shapes(logprobs_N, sequence_index_N)
    all_N = torch.ones_like(sequence_index_N, dtype=torch.bool)
    weights = aggregate(all_N, sequence_index_N, num_sequences, "token", max_length=1)
    loss_sum = -(weights.weight * logprobs_N).sum(dtype=torch.float64)
    return NllOutput(loss_sum, weights.denominator.double(), all_N.sum())


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """Negative log-likelihood. It skips nothing and has no behavior policy."""

    @property
    def needs_entropy_grad(self) -> bool:
        return False

    def __call__(self, batch: DeviceBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        out = nll_loss(scored.logprobs, batch.sequence_index, batch.num_sequences)
        entropy = scored.entropies.detach().sum(dtype=torch.float64)
        kl = torch.zeros_like(entropy)
        sums = torch.stack([out.weight_sum, out.loss_sum.detach(), out.num_tokens.double(), entropy, kl])
        nothing = torch.zeros(batch.num_sequences, dtype=torch.bool, device=sums.device)
        return MicroBatchResult(out.loss_sum, sums, nothing, sums.new_zeros(()))

    def why_skip(self, sums: Tensor) -> str:
        return ""


def policy_objective(config: Config) -> PolicyObjective:
    """The loss of a reinforcement learning run, with diagnostics for every staleness that may occur."""
    return PolicyObjective(config.loss, config.queue.max_staleness, config.sampling.max_new_tokens)


def why_skip(sums: Tensor, loss: LossConfig) -> str:
    """Why the optimizer step with these sums (of the whole step, on the host) must be skipped; empty: it must not.

    The limits hold for the tokens that are left in the loss: ``loss.min_ess`` for the effective sample size of their
    ratios, ``loss.max_kl`` for the k3 estimate of KL(mu || pi). The engine itself skips a step without tokens.
    """
    if loss.min_ess is None and loss.max_kl is None:
        return ""
    step = _summary(sums)
    if loss.min_ess is not None and step.ess < loss.min_ess:
        return (
            f"the effective sample size is {step.ess:.3g} of its tokens, limit loss.min_ess = {loss.min_ess}; lower "
            f"queue.max_staleness or optimizer.lr"
        )
    if loss.max_kl is not None and step.kl > loss.max_kl:
        return (
            f"KL(mu || pi) is {step.kl:.3g} nats, limit loss.max_kl = {loss.max_kl}; lower queue.max_staleness or "
            f"optimizer.lr"
        )
    return ""


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
    count = max(1.0, total["tokens"])
    rows = _rows(sums).numpy()
    step = summarise(rows.sum(0))
    return UpdateStats(
        stepped=not outcome.reason,
        reason=outcome.reason,
        loss=total["loss"] / total["denominator"] if total["denominator"] else 0.0,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        tokens_trained=int(total["tokens"]),
        ratio_mean=step.ratio_mean,
        ratio_max=ratio_max,
        clip_fraction=step.capped_low + step.capped_high,
        ess=step.ess,
        entropy=total["entropy"] / count,
        mean_abs_log_ratio=step.mean_abs_log_ratio,
        skipped_sequence_ids=tuple(skipped_sequence_ids),
        skipped_tokens=step.num_skipped,
        mismatch_kl={lag: k3_sum_and_tokens(row) for lag, row in enumerate(rows) if row.any()},
        out_of_range_tokens=step.num_out_of_range,
        reference_kl=total["reference_kl"] / count,
        by_lag=rows,
    )


def _rows(sums: Tensor) -> Tensor:
    """float64 [lags, COLUMNS]."""
    return sums[len(SUM_NAMES) :].view(-1, COLUMNS)


def _summary(sums: Tensor) -> Summary:
    return summarise(_rows(sums).sum(0).numpy())
